"""Debuggers and profilers that follow this process to its children: a fork of another process they would not see."""

from __future__ import annotations

import contextlib
import os

from mlaunch.base.confinement import read

# Those that trace are known by the kernel's word; these look at what their child starts.
_NAMES = {"perf", "py-spy", "nsys", "ncu", "rr", "vtune", "uftrace", "valgrind", "strace", "ltrace", "gdb", "samply"}
_PARENT = 1  # behind the name and the state in /proc/PID/stat


def onlooker() -> str:
    """Name what traces this process, or has started it to profile it, as "strace (pid 7)"; "": nothing does."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a process that is not shown
        tracer = next((row.split()[1] for row in read("/proc/self/status").splitlines() if "TracerPid" in row), "0")
        if tracer != "0":
            return f"{read(f'/proc/{tracer}/comm').strip()} (pid {tracer})"
        pid = os.getppid()
        while pid > 1:
            name, _, rest = read(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
            if name.partition("_")[0] in _NAMES:  # Debian's perf has the kernel's version behind its name
                return f"{name} (pid {pid})"
            pid = int(rest.split()[_PARENT])
    return ""
