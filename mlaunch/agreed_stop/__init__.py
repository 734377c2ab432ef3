"""A stop at a step that all ranks agree on: ``mlaunch.stopping``, ``stop_on=``, ``mlaunch stop``."""
