"""Starts a launch and follows one from its plan to its result."""
