"""The call of ranks that were prepared: they wait for it, and are ended if none comes or one of them ends.

Ranks that wait leave after a minute, or when memory gets short. A launcher that takes no notice of their end has asked
them for nothing.
"""

from __future__ import annotations

import dataclasses
import os
import secrets

from mlaunch.agent.launch_state import LaunchState
from mlaunch.agent.one_call import OneCall
from mlaunch.agent.scene import AgentParts
from mlaunch.base import linux
from mlaunch.base.deadline import NEVER, Deadline
from mlaunch.base.fds import close_all
from mlaunch.base.own_process import name_process
from mlaunch.protocol.messages import AgentHears, CallBegun
from mlaunch.protocol.spec import Details, LaunchSpec, new_launch_id

WAIT_LIMIT = 60.0  # seconds without a call
_LOOK_DELAY = 20.0  # seconds between looks at the memory


def as_prepared(spec: LaunchSpec) -> LaunchSpec:
    """Return a launch like the last one, with an id and a secret of its own."""
    unknown = spec.called(name="(prepared for the next call)", deadline=None, time_left=None, seed=None)
    return dataclasses.replace(unknown, launch_id=new_launch_id(), secret=secrets.token_hex(16), prepared=True)


class PreparedCall(OneCall):
    """A call that is waited for. Once it has begun, it is as any other."""

    def __init__(self, launch: LaunchState, parts: AgentParts) -> None:
        super().__init__(launch, parts)
        self.must_stay = self._waits = True  # for their call
        self._leave_at = launch.clock() + WAIT_LIMIT
        self._look_at = launch.clock()

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
        """Look whether no rank has ended, since nobody has for a while."""
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
        return self._look_at if self._waits and not self._launch.stopping.begun else NEVER

    def take_steps(self) -> None:
        now = self._launch.clock()
        if now < self.due():
            return
        if now >= self._leave_at or linux.memory_is_short():
            self._launch.stopping.without_asking(force=True)
        else:
            self._look_at = min(now + _LOOK_DELAY, self._leave_at)
