"""The supervisor of ranks that were prepared: it waits for their call, and ends them if none comes or one of them ends.

Until then they cost little. They have the lowest priority, if this process may raise it again; after a while they are
stopped, since each of gloo's loops wakes 100 times a second; and they leave when memory gets short. A launcher that
takes no notice of their end has asked them for nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import secrets
import signal
from typing import TYPE_CHECKING

from mlaunch.agent.supervision.launch_state import Supervision
from mlaunch.agent.supervision.supervisor import Supervisor
from mlaunch.base import linux
from mlaunch.base.fds import close_all
from mlaunch.base.process_name import name_process
from mlaunch.protocol.messages.launch_messages import Phase
from mlaunch.protocol.messages.prepared_messages import BeginCall, CallBegun
from mlaunch.protocol.spec import LaunchSpec, new_launch_id

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentHears

WAIT_LIMIT = 60.0  # seconds without a call
_LOOK_DELAY = 20.0  # seconds between looks at the memory
_STOP_DELAY = 0.1  # seconds between looks whether all ranks wait and may be stopped
_LOWEST = 19


def as_prepared(spec: LaunchSpec) -> LaunchSpec:
    """Returns a launch like the last one, with what is its own."""
    return dataclasses.replace(
        spec,
        launch_id=new_launch_id(),
        secret=secrets.token_hex(16),
        name="(prepared for the next call)",
        deadline=None,
        time_left=None,
        seed=None,
        prepared=True,
    )


def lower_priority() -> int | None:
    """Gives this process the lowest; returns what it had, None if that could not be given back."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NICE)
    # A call would run at the lowest priority for good.
    if os.geteuid() != 0 and (allowed != resource.RLIM_INFINITY and allowed < 20 - before):
        return None
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    return before


class PreparedSupervisor(Supervisor):
    """Once it has passed the call on, it is as any other.

    ``priority``: what the ranks get then; None: they have it.
    """

    def __init__(self, scene: Supervision, priority: int | None) -> None:
        super().__init__(scene)
        self._priority = priority
        self._must_stay = self._waits = True  # for their call
        self._leave_at = self._clock() + WAIT_LIMIT
        self._look_at = self._clock() + _STOP_DELAY

    def _obey(self, record: AgentHears | None, fds: list[int]) -> bool:
        if not isinstance(record, BeginCall):
            return False
        if self._waits and not self._stopping.begun and self._all_ready():
            self.leases = tuple(fds[1:])
            self._begin_prepared(record, fds[0])
            os.close(fds[0])
        else:
            self._stopping.without_asking(force=True)
            close_all(fds)
        return True

    def _all_ready(self) -> bool:
        """Tells whether no rank has ended; nobody has looked for a while."""
        return len(self._ranks) == len(self._by_local_rank) and not linux.wait_readable(list(self._ranks), 0.0)

    def _begin_prepared(self, record: BeginCall, call_fd: int) -> None:
        self._must_stay = self._waits = False
        self._wake()
        self._raise_priority()  # before the call, which may start processes that keep what it has
        # Before the call is passed on: a launch that ends without this word has run nothing, so its call is made
        # anew.
        self._launcher.try_send(CallBegun())
        left = record.details.deadline if record.details.time_left is None else record.details.time_left
        self.begin_call(call_fd, record.details.deadline, left, record.details)
        name_process("agent", record.details.name)
        if self._inspection is not None:
            self._inspection.learn(record.details)

    def _rest(self) -> bool:
        """Stops the ranks, if they have come to where they wait; tells whether they have."""
        if not all(self._results.board[rank.local_rank] is Phase.IDLE for rank in self._by_local_rank):
            return False
        for rank in self._by_local_rank:
            # Each of gloo's loops wakes 100 times a second, 2 to 3 ms of a core per second and rank. A higher timer
            # slack would do, too, but could not be taken back without a privilege.
            rank.rests = True
            self._signal_group(rank.pid, signal.SIGSTOP)
        return True

    def _wake(self) -> None:
        """Lets the ranks run again, whoever has stopped them."""
        for rank in self._ranks.values():
            rank.rests = False
            # Whoever else has stopped one is overruled: nothing of a waiting rank is worth a look.
            self._signal_group(rank.pid, signal.SIGCONT)

    def _begin_stopping(self) -> None:
        if self._waits:
            self._wake()  # else they could not end in their own way
        super()._begin_stopping()

    def _raise_priority(self) -> None:
        if self._priority is None:
            return
        for thread in os.listdir("/proc/self/task"):  # the store has one
            # Linux keeps a priority for each thread, whatever POSIX says.
            os.setpriority(os.PRIO_PROCESS, int(thread), self._priority)
        for rank in self._by_local_rank:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PGRP, rank.pid, self._priority)  # all its threads

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
                self._look_at = min(now + (_LOOK_DELAY if self._rest() else _STOP_DELAY), self._leave_at)
        super()._take_steps()
