"""On which core a process does what, where the kernel's own choice costs milliseconds."""

from __future__ import annotations

import contextlib
import os

_FEW = 64  # threads


def wait_on_one(number: int) -> set[int]:
    """Keeps the calling thread to one core, chosen by ``number``; returns those that it had, for ``leave``.

    Whoever wakes several processes at once often finds them on one core, one after the other, while others are idle.
    """
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {sorted(before)[number % len(before)]})
    return before


def count() -> int:
    """Returns how many this process may use."""
    return len(os.sched_getaffinity(0))


def leave(before: set[int]) -> None:
    """Lets the calling thread run where it could before; nowhere else if it has lost these cores meanwhile."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before)


def end_on_this_one() -> None:
    """Has the other threads of this process, which is about to end, end on the core where it runs.

    The last to end takes the process's memory down. Threads that sleep elsewhere would do that one process after the
    other on one core, while those on which their main threads ran are idle.
    """
    with contextlib.suppress(OSError):  # no /proc, no descriptor left, or one that has just ended
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        if 1 < len(threads) <= _FEW:
            here = _core()
            for thread in threads:
                os.sched_setaffinity(thread, {here})


def _core() -> int:
    """Returns the core on which the calling thread is."""
    with open("/proc/thread-self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[36])
