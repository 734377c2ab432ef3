"""Launches over several machines, each of which has a caller or a member of its own: they join, and end together."""
