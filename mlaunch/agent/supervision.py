"""All that a supervisor is given: the ranks, the system calls, whose clock a test can replace, the other machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, NoReturn

from mlaunch.agent import rank_process
from mlaunch.agent.inspection import Inspection
from mlaunch.agent.rank_process import RankProcess
from mlaunch.base import linux, orphans
from mlaunch.base.deadline import NEVER
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.orphans import ChildEnds
from mlaunch.protocol.messages import AgentHears, AgentsEnd, ForPart, PartSays, Phase, Refused
from mlaunch.protocol.result_queue import Results

if TYPE_CHECKING:
    from mlaunch.base.exceptions import RankFailure
    from mlaunch.machines.gate import GateProcess
    from mlaunch.protocol.spec import LaunchSpec


class Peers:
    """The other machines of a launch: none. ``machines/agent.py`` has a subclass for those that there are.

    Attributes:
        alone: True: there are no other machines.
        agree: Each machine has a caller of its own, so they have to agree on when to stop.
        pids: Of processes that nobody else reaps.
    """

    alone = True
    agree = False
    pids: Sequence[int] = ()

    @property
    def awaited(self) -> bool:
        """True if some have not finished."""
        return False

    def fds(self) -> list[int]:
        return []

    def due(self) -> float:
        """Return when the connection to them counts as lost, in monotonic seconds."""
        return NEVER

    def hear(self, ready: Collection[int]) -> RankFailure | ForPart | None:  # noqa: ARG002 - others need it
        """Return the first failure of another machine, or a word for a feature's part, if that is the news."""
        return None

    def say(self, record: PartSays) -> None:
        """Send the other machines a message of a feature's part."""

    def tell(self, failure: RankFailure) -> None:
        """Send the other machines the first failure here; those that follow go to this machine's caller."""

    def finish(self) -> None:
        """Tell the other machines that this machine's ranks are gone."""


@frozen_record
class System:
    """The system calls of a supervisor, and its clock, which a test can replace.

    Attributes:
        clock: Gives monotonic seconds.
        wait: ``linux.wait_readable``.
        end_children: That of ``orphans``, and so is ``reap``.
        child_ends: Makes the object that notices when children end.
        group: Signals a process group by its leader's pid.
        process: Signals only a rank, not what it has started.
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
    request: Callable[[int, Phase, int], bool] = rank_process.request_stacks
    is_ending: Callable[[int, Phase], bool] = rank_process.is_ending
    is_failing: Callable[[int], bool] = rank_process.is_failing
    watch: Callable[[int], list[int]] = rank_process.watch_threads


@frozen_record
class Supervision:
    """Everything that a supervisor watches. ``parent``: a pidfd of the process that must outlive it."""

    ranks: Sequence[RankProcess]
    results: Results
    server: GateProcess | None
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


@frozen_record
class Joined:
    """The result of joining. ``server``: the process with the gate and the launch's store, if this machine has it."""

    spec: LaunchSpec
    server: GateProcess | None
    peers: Peers


class NoLaunchError(Exception):
    """The machines did not come together, or have no room; the launcher has been told."""


def refuse(launcher: AgentsEnd, why: str, *, late: bool = False) -> NoReturn:
    """Tell the launcher why there is no launch. ``late``: its deadline has passed."""
    launcher.try_send(Refused(why, late=late))
    raise NoLaunchError
