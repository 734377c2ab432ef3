"""Code of the caller: the process in which a decorated function is called, or the command ``mlaunch run``."""
