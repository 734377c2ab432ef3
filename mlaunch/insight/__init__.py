"""What ranks do right now: ``mlaunch why``, ``stacks``, ``ps --watch``, and ``stall=``, which reports by itself."""
