"""A debugger in ranks: ``debug=``, ``breakpoint()``, ``mlaunch debug``, and an IDE that debugs the caller."""
