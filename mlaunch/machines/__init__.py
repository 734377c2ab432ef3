"""Launches over several machines, each with its own caller or member: the machines join, and end together."""
