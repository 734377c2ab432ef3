"""The caller's part of ``numa=``: it finds the machine's devices, and checks lists of CPUs."""

from mlaunch.numa.caller.order import part as part
