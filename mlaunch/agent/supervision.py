"""All that a supervisor is given: a launch that has begun, and the world, whose clock a test can move."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from mlaunch.agent import stack_requests
from mlaunch.agent.inspection import Inspection
from mlaunch.agent.peers import Peers
from mlaunch.agent.rank_process import RankProcess
from mlaunch.base import linux, orphans
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.orphans import ChildEnds
from mlaunch.protocol.messages import AgentHears, AgentsEnd, Phase
from mlaunch.protocol.result_queue import Results

if TYPE_CHECKING:
    from mlaunch.machines.gate.store_process import StoreProcess

_PIDFD_THREAD = os.O_EXCL  # as the kernel defines it
_EXIT_CODE = 49  # its place in /proc/PID/stat behind the name


def watch_threads(pid: int) -> list[int]:
    """Open pidfds of two threads of a process, the main one and another if there is one; of none on older kernels."""
    found: list[int] = []
    if os.readlink("/proc/self") != str(os.getpid()):  # it numbers processes otherwise
        return found
    others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    for thread in (pid, *others[:1]):
        with contextlib.suppress(OSError):
            found.append(os.pidfd_open(thread, _PIDFD_THREAD))
    return found


def is_failing(pid: int) -> bool:
    """True if a process has begun to end with a status other than 0, which nothing can change any more."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_EXIT_CODE]) != 0
    return False


@frozen_record
class System:
    """The world as a supervisor acts on it.

    Attributes:
        clock: Gives monotonic seconds.
        wait: ``linux.wait_readable``.
        end_children: That of ``orphans``, and so is ``reap``.
        child_ends: Makes the object that hears of ends.
        group: Signals a process group by its leader's pid.
        process: Signals a rank alone.
        stray: Signals a process that has left its group, by pid and pidfd.
        request: Asks for stacks by a signal; False: that rank cannot answer.
        is_ending: True if a rank, by pid, is about to end.
        is_failing: True if it has begun to end by failure.
        watch: Opens pidfds of two of its threads.
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


@frozen_record
class Supervision:
    """Everything that a supervisor watches. ``parent``: a pidfd of the process that must outlive it."""

    ranks: Sequence[RankProcess]
    results: Results
    server: StoreProcess | None
    launcher: AgentsEnd
    parent: int
    grace_period: float  # seconds
    inspection: Inspection
    peers: Peers = field(default_factory=Peers)
    system: System = field(default_factory=System)
    sections: Mapping[str, object] = field(default_factory=dict)  # as in LaunchSpec
    callers_signals: tuple[int, ...] = ()
    # What the launcher has said while the ranks were forked, with descriptors.
    said: Sequence[tuple[AgentHears | None, list[int]]] = ()
