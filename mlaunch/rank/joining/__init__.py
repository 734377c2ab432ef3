"""Processes that others have started become ranks."""
