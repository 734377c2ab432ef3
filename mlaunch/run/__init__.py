"""``mlaunch run``: scripts, modules and programs on every rank, under torchrun's command line.

``python -m mlaunch.run`` is the same, under the name that torch gives its own.
"""
