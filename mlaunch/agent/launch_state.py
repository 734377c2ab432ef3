"""A launch on this machine while it runs: its ranks, the call that they are in, and the means to end both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlaunch.agent.questions import Questions
from mlaunch.agent.stopping import Stopping
from mlaunch.agent.supervision import Supervision
from mlaunch.base.deadline import Deadline
from mlaunch.protocol.channel import pickled
from mlaunch.protocol.messages import Errand, RunCall
from mlaunch.protocol.spec import Details

if TYPE_CHECKING:
    pass


@dataclass
class OngoingCall:
    """One call on the ranks."""

    number: int
    seconds: float | None = None  # of its deadline, as the caller gave it; None: it has none
    deadline: Deadline = field(default_factory=Deadline)  # on the supervisor's clock
    released: bool = False  # all have answered, so the ranks may go on
    errand: Errand = Errand.RUN
    details: Details | None = None  # for ranks that were prepared
    from_launcher: bool = False  # the launcher sent it to the ranks itself, and gets small values without us


class LaunchState:
    """The state of a launch. ``on_stop`` is called when its end begins.

    Attributes:
        ranks: Those that are not reaped, by pidfd.
        by_local_rank: All of them.
        call: The present one, or the last.
        held: Descriptors that came with the call, which the ranks hold, too.
    """

    def __init__(self, scene: Supervision, on_stop: Callable[[], None]) -> None:
        self.ranks = {rank.pidfd: rank for rank in scene.ranks}
        self.by_local_rank = scene.ranks
        self.board, self.launcher, self.inspection = scene.results.board, scene.launcher, scene.inspection
        self.peers, self.sections = scene.peers, scene.sections
        self.clock, self.grace_period = scene.system.clock, scene.grace_period
        self.call = OngoingCall(-1)
        self.held: tuple[int, ...] = ()
        self.questions = Questions({one.rank: one.control for one in scene.ranks if one.control is not None})
        self.stopping = Stopping(self.ranks, scene, self.questions, on_stop)

    def begin_only_call(
        self, call_fd: int | None, seconds: float | None, deadline: Deadline, details: Details | None = None
    ) -> None:
        """Send all ranks the call that they leave after. ``call_fd`` None: they have it in memory.

        ``seconds``: of its deadline, as the caller gave it; ``deadline``: what is left of that.
        """
        self.begin(OngoingCall(0, seconds, deadline, details=details), call_fd=call_fd)
        if not self.peers.awaited:  # peers learn why we stop, which is known only when the rank has ended
            self.stopping.endings.watch_soon()

    def begin(self, call: OngoingCall, data: bytes = b"", call_fd: int | None = None) -> None:
        """Send all ranks a call, or an errand of the agent."""
        self.call = call
        record = pickled(RunCall(call.number, call.errand, data, call_fd is not None, call.details))
        for rank in self.by_local_rank:
            rank.begin_call(record, [*self.held] if call_fd is None else [call_fd, *self.held])
