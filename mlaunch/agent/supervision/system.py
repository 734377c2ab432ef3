"""What a supervisor has of the world, so that its policy can be tested on records and a clock that a test moves."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable

from mlaunch.agent.supervision import stack_requests
from mlaunch.base import linux, orphans
from mlaunch.base.child_ends import ChildEnds
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import Phase

_PIDFD_THREAD = os.O_EXCL  # as the kernel defines it
_EXIT_CODE = 49  # its place in /proc/PID/stat behind the name


def watch_threads(pid: int) -> list[int]:
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


@frozen_record
class System:
    """``clock`` gives monotonic seconds. ``group`` signals a process group by its leader's pid; ``process`` a rank
    alone; ``stray`` one that has left its group, by pid and pidfd. ``request`` asks for stacks by a signal; False: that
    rank cannot. ``is_ending`` tells whether a rank, by pid, is about to end; ``is_failing``, whether it has begun to
    end by failure. ``watch`` opens pidfds of two of its threads. ``wait`` is ``linux.wait_readable``, ``end_children``
    that of ``orphans``, and so is ``reap``; ``child_ends`` makes what hears of ends.
    """

    clock: Callable[[], float] = time.monotonic
    wait: Callable[[Iterable[int], float | None], list[int]] = linux.wait_readable
    end_children: Callable[[set[int]], None] = orphans.end_children
    reap: Callable[[Collection[int]], None] = orphans.reap
    child_ends: Callable[[], ChildEnds] = ChildEnds
    group: Callable[[int, int], None] = linux.signal_group
    process: Callable[[int, int], None] = os.kill
    stray: Callable[[int, int, int], None] = linux.signal_if_not_leader
    request: Callable[[int, Phase, int], bool] = stack_requests.request
    is_ending: Callable[[int, Phase], bool] = stack_requests.is_ending
    is_failing: Callable[[int], bool] = is_failing
    watch: Callable[[int], list[int]] = watch_threads
