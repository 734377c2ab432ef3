"""The cores that a process uses, where the kernel's own choice costs milliseconds."""

from __future__ import annotations

import contextlib
import os
import threading

_FEW = 64  # threads


def of_list(text: str) -> frozenset[int]:
    """Return the numbers in a list as the kernel writes it, "0-7,16". ValueError for any other text."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ValueError(f"{part!r}: allowed: a number, or a range such as 0-7")
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)


def wait_on_one(number: int) -> set[int]:
    """Restrict the calling thread to one core, chosen by ``number``; return those that it had, for ``leave``.

    Several processes that are woken at once often run on one core, one after the other, while others are idle.
    """
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        # Measured: 15.4 ms to 12.9 for a call of 2 ranks after a pause, together with end_on_one.
        os.sched_setaffinity(0, {_one(number, before)})
    return before


def count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def leave(before: set[int]) -> None:
    """Give the calling thread its cores back; do nothing if it has lost them meanwhile."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before)


def end_on_one(number: int) -> None:
    """Make the other threads of this process, which is about to end, end on one core, chosen by ``number``.

    The last to end frees the process's memory. Otherwise threads of several processes, which sleep where they ran last,
    often do that on one core, one process after the other, while other cores are idle.
    """
    with contextlib.suppress(OSError):  # no /proc, no descriptor left, or one that has just ended
        threads = {int(name) for name in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        # A system call for each: with more threads that would cost more than it saves.
        if len(threads) <= _FEW:
            one = {_one(number, os.sched_getaffinity(0))}
            for thread in threads:
                os.sched_setaffinity(thread, one)


def _one(number: int, allowed: set[int]) -> int:
    return sorted(allowed)[number % len(allowed)]
