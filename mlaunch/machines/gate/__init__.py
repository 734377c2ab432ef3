"""The process where the machines of a launch join."""
