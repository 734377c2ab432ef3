"""The process at which the machines of a launch join."""
