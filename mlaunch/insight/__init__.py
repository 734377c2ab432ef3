"""What ranks do right now: ``mlaunch why``, ``stacks``, ``ps --watch``, and ``stall=``, which tells of it unasked."""
