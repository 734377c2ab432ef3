"""On which core a process does what, where the kernel's own choice costs milliseconds."""

from __future__ import annotations

import contextlib
import os
import threading

_FEW = 64  # threads


def of_list(text: str) -> frozenset[int]:
    """Return the numbers in a list as the kernel writes it, "0-7,16". ValueError for what is none."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ValueError(f"{part!r}: allowed: a number, or a range such as 0-7")
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)


def wait_on_one(number: int) -> set[int]:
    """Keeps the calling thread to one core, chosen by ``number``; returns those that it had, for ``leave``.

    Whoever wakes several processes at once often finds them on one core, one after the other, while others are idle.
    """
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        # Measured: 15.4 ms to 12.9 for a call of 2 ranks after a pause, together with end_on_one.
        os.sched_setaffinity(0, {_one(number, before)})
    return before


def count() -> int:
    """Returns how many this process may use."""
    return len(os.sched_getaffinity(0))


def leave(before: set[int]) -> None:
    """Lets the calling thread run where it could before; nowhere else if it has lost these cores meanwhile."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before)


def end_on_one(number: int) -> None:
    """Makes the other threads of this process, which is about to end, end on one core, chosen by ``number``.

    The last to end takes the process's memory down. Else those of several processes, which sleep where they happened to
    run last, often do that one process after the other on one core, while others are idle.
    """
    with contextlib.suppress(OSError):  # no /proc, no descriptor left, or one that has just ended
        threads = {int(name) for name in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        # A system call for each; a process with more has better things to do with its end.
        if len(threads) <= _FEW:
            one = {_one(number, os.sched_getaffinity(0))}
            for thread in threads:
                os.sched_setaffinity(thread, one)


def _one(number: int, allowed: set[int]) -> int:
    return sorted(allowed)[number % len(allowed)]
