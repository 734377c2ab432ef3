"""The calls of a launch, which its supervisor drives: a normal launch has one, after which its ranks leave.

Prepared ranks wait for that call; ``ranks/agent.py`` runs one call after the other. The supervisor reports what has
come, and these classes act on the launch's state (``launch_state.py``).
"""

from __future__ import annotations

import dataclasses
import os
import secrets

from mlaunch.agent.launch_state import LaunchState
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.scene import AgentParts
from mlaunch.base import linux
from mlaunch.base.deadline import NEVER, Deadline
from mlaunch.base.fds import close_all
from mlaunch.base.own_process import name_process
from mlaunch.protocol.messages import AgentHears, CallBegun, RankAnswered
from mlaunch.protocol.spec import Details, LaunchSpec, new_launch_id

WAIT_LIMIT = 60.0  # seconds that prepared ranks wait for a call
_MEMORY_DELAY = 20.0  # seconds between checks of the memory meanwhile


class Calls:
    """The calls of a launch.

    Attributes:
        must_stay: A rank that ends is a failure, even if it ends well.
    """

    must_stay = False

    def __init__(self, launch: LaunchState, parts: AgentParts) -> None:
        self._launch, self._parts = launch, parts

    def hear(self, _record: AgentHears | None, _fds: list[int]) -> bool:
        """Act on what the launcher says about its calls, and close the descriptors; False if it is something else."""
        return False

    def catch_up(self) -> None:
        """Read from the board which calls were sent, and answered, past this process. Called before answers count."""

    def forward(self, rank: RankProcess, record: RankAnswered) -> None:
        """Pass on what a rank has answered."""
        self._launch.launcher.try_send(record, rank.content.fds())

    def lose_rank(self) -> None:
        """Prepare for the report that a rank has ended."""

    def all_answered(self) -> None:
        """Act once no rank works on the call any more. Called until the call is ``released``."""
        raise NotImplementedError

    def end(self, delay: float) -> None:
        """End the call, which has failed, after this time at the latest."""
        raise NotImplementedError

    def due(self) -> float:
        """Return when ``take_steps`` is due even if nothing comes."""
        return NEVER

    def take_steps(self) -> None:
        """Take the steps that are due, before those of stopping. Called whenever anything has come."""


class OneCall(Calls):
    """The only call of a launch: its ranks leave after it."""

    def all_answered(self) -> None:
        """Release the ranks: none works on the call any more."""
        self._launch.call.released = True
        self._launch.stopping.endings.close()
        self._launch.stopping.expect_ends()
        for rank in self._launch.ranks.values():
            rank.release()

    def end(self, delay: float) -> None:
        self._launch.stopping.within(delay)


def as_prepared(spec: LaunchSpec) -> LaunchSpec:
    """Return a launch like the last one, with an id and a secret of its own."""
    unknown = spec.called(name="(prepared for the next call)", deadline=None, time_left=None, seed=None)
    return dataclasses.replace(unknown, launch_id=new_launch_id(), secret=secrets.token_hex(16), prepared=True)


class PreparedCall(OneCall):
    """The call that prepared ranks wait for. Once it has begun, it is as any other.

    The ranks are ended if no call comes, if one of them ends, or when memory gets short. A launcher that takes no
    notice of their end has asked them for nothing.
    """

    def __init__(self, launch: LaunchState, parts: AgentParts) -> None:
        super().__init__(launch, parts)
        self.must_stay = self._waits = True  # for their call
        self._leave_at = launch.clock() + WAIT_LIMIT
        self._check_at = launch.clock()  # the memory

    def hear(self, record: AgentHears | None, fds: list[int]) -> bool:
        if not isinstance(record, Details):
            return False
        if self._waits and not self._launch.stopping.begun and self._all_ready():
            self._launch.held = tuple(fds[1:])
            self._begin_prepared(record, fds[0])
            os.close(fds[0])
        else:
            self._launch.stopping.without_asking(force=True)
            close_all(fds)
        return True

    def _all_ready(self) -> bool:
        """True if no rank has ended: nobody has checked for a while."""
        ranks = self._launch.ranks
        return len(ranks) == len(self._launch.by_local_rank) and not linux.wait_readable(list(ranks), 0.0)

    def _begin_prepared(self, record: Details, call_fd: int) -> None:
        self.must_stay = self._waits = False
        # Before the call is passed on: a launch that ends without this word has run nothing, so another one makes its
        # call.
        self._launch.launcher.try_send(CallBegun())
        call = record.call
        left = call.deadline if call.time_left is None else call.time_left
        deadline = Deadline().start(left, self._launch.clock())
        self._launch.begin_only_call(call_fd, call.deadline, deadline, record)
        name_process("agent", call.name)
        self._launch.inspection.learn(record)

    def due(self) -> float:
        return self._check_at if self._waits and not self._launch.stopping.begun else NEVER

    def take_steps(self) -> None:
        now = self._launch.clock()
        if now < self.due():
            return
        if now >= self._leave_at or linux.memory_is_short():
            self._launch.stopping.without_asking(force=True)
        else:
            self._check_at = min(now + _MEMORY_DELAY, self._leave_at)
