"""Where a machine's devices are, and whether the CPUs that were given can be had."""

from mlaunch.numa.caller.order import part as part
