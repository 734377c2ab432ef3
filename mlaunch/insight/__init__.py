"""Inspection of running ranks: ``mlaunch why``, ``stacks``, ``ps --watch``, and ``stall=``, which reports by itself."""
