"""The supervisor of ranks that were prepared: it waits for their call, and ends them if none comes or one of them ends.

Ranks that wait leave after a minute, or when memory gets short. A launcher that takes no notice of their end has asked
them for nothing.
"""

from __future__ import annotations

import dataclasses
import os
import secrets

from mlaunch.agent.supervision.launch_state import Supervision
from mlaunch.agent.supervision.supervisor import Supervisor
from mlaunch.base import linux
from mlaunch.base.fds import close_all
from mlaunch.base.process_name import name_process
from mlaunch.protocol.messages import AgentHears, CallBegun
from mlaunch.protocol.spec import Details, LaunchSpec, new_launch_id

WAIT_LIMIT = 60.0  # seconds without a call
_LOOK_DELAY = 20.0  # seconds between looks at the memory


def as_prepared(spec: LaunchSpec) -> LaunchSpec:
    """Returns a launch like the last one, with what is its own."""
    unknown = spec.called(name="(prepared for the next call)", deadline=None, time_left=None, seed=None)
    return dataclasses.replace(unknown, launch_id=new_launch_id(), secret=secrets.token_hex(16), prepared=True)


class PreparedSupervisor(Supervisor):
    """Once it has passed the call on, it is as any other."""

    def __init__(self, scene: Supervision) -> None:
        super().__init__(scene)
        self._must_stay = self._waits = True  # for their call
        self._leave_at = self._clock() + WAIT_LIMIT
        self._look_at = self._clock()

    def _obey(self, record: AgentHears | None, fds: list[int]) -> bool:
        if not isinstance(record, Details):
            return False
        if self._waits and not self._stopping.begun and self._all_ready():
            self.held = tuple(fds[1:])
            self._begin_prepared(record, fds[0])
            os.close(fds[0])
        else:
            self._stopping.without_asking(force=True)
            close_all(fds)
        return True

    def _all_ready(self) -> bool:
        """Tells whether no rank has ended; nobody has looked for a while."""
        return len(self._ranks) == len(self._by_local_rank) and not linux.wait_readable(list(self._ranks), 0.0)

    def _begin_prepared(self, record: Details, call_fd: int) -> None:
        self._must_stay = self._waits = False
        # Before the call is passed on: a launch that ends without this word has run nothing, so its call is made
        # anew.
        self._launcher.try_send(CallBegun())
        left = record.call.deadline if record.call.time_left is None else record.call.time_left
        self.begin_call(call_fd, record.call.deadline, left, record)
        name_process("agent", record.call.name)
        if self._inspection is not None:
            self._inspection.learn(record)

    def _timeout(self) -> float | None:
        watches = self._waits and not self._stopping.begun
        ours = max(0.0, self._look_at - self._clock()) if watches else None
        return min((one for one in (super()._timeout(), ours) if one is not None), default=None)

    def _take_steps(self) -> None:
        now = self._clock()
        if self._waits and not self._stopping.begun and now >= self._look_at:
            if now >= self._leave_at or linux.memory_is_short():
                self._stopping.without_asking(force=True)
            else:
                self._look_at = min(now + _LOOK_DELAY, self._leave_at)
        super()._take_steps()
