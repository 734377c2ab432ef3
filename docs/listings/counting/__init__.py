"""How many calls the ranks of a launch have been given, in ``mlaunch ps``."""
