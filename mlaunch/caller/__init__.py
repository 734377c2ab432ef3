"""Runs in the caller: the process whose user calls a decorated function, or the command ``mlaunch run``."""
