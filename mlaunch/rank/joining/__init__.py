"""Processes that another launcher has started become ranks."""
