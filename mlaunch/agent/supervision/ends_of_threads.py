"""What the kernel tells of the threads of another process."""

from __future__ import annotations

import contextlib
import os

_PIDFD_THREAD = os.O_EXCL  # as the kernel defines it
_EXIT_CODE = 49  # its place in /proc/PID/stat behind the name


def watch(pid: int) -> list[int]:
    """Opens pidfds of two threads of a process, the main one and another if there is one; of none on older kernels."""
    found: list[int] = []
    if os.readlink("/proc/self") != str(os.getpid()):  # it numbers processes otherwise
        return found
    others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    for thread in (pid, *others[:1]):
        with contextlib.suppress(OSError):
            found.append(os.pidfd_open(thread, _PIDFD_THREAD))
    return found


def is_failing(pid: int) -> bool:
    """Tells whether a process has begun to end with a status other than 0, which nothing can change any more."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_EXIT_CODE]) != 0
    return False
