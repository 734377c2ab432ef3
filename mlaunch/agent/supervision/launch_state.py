"""What a supervisor is given, and what it knows of the call that is running."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlaunch.agent.inspection import Inspection
from mlaunch.agent.peers import Peers
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.system import System
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import AgentHears, AgentsEnd, Errand
from mlaunch.protocol.result_queue import Results
from mlaunch.protocol.spec import Details

if TYPE_CHECKING:
    from mlaunch.machines.gate.store_process import StoreProcess

# After a failure nobody waits for the others longer than it takes to tell them.
_FAREWELL_TIMEOUT = 1.0  # seconds for the other machines to hear of a failure


@frozen_record
class Supervision:
    """Everything that a supervisor watches. ``parent``: a pidfd of the process that must outlive it."""

    ranks: Sequence[RankProcess]
    results: Results
    server: StoreProcess | None
    launcher: AgentsEnd
    parent: int
    grace_period: float  # seconds
    inspection: Inspection | None = None
    peers: Peers = field(default_factory=Peers)
    system: System = field(default_factory=System)
    sections: Mapping[str, object] = field(default_factory=dict)  # as in LaunchSpec
    callers_signals: tuple[int, ...] = ()
    # What the launcher has said while the ranks were forked, with descriptors.
    said: Sequence[tuple[AgentHears | None, list[int]]] = ()


@dataclass
class OngoingCall:
    """What belongs to one call on the ranks. ``deadline``: seconds, None: no limit."""

    number: int
    deadline: float | None  # as the caller gave it
    due: float | None  # when the deadline passes, on the supervisor's clock; None: it does not, or it has
    released: bool = False  # all have answered, so the ranks may go on
    errand: Errand = Errand.RUN
    details: Details | None = None  # for ranks that were prepared
    from_launcher: bool = False  # who sent it to the ranks, and hears of small values without us
    left: float | None = None  # seconds of the deadline, while that is held

    def hold(self, now: float, *, held: bool) -> None:
        """Hold the deadline, or have it count on."""
        left = self.left
        if held and self.due is not None:
            self.left, self.due = self.due - now, None
        elif not held and left is not None:
            self.left, self.due = None, now + left


class SharedFailure:
    """What the peers are told of this machine's failures. ``clock`` gives monotonic seconds."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._first: RankFailure | None = None
        self.farewell_at: float | None = None  # when we no longer wait for the peers to hear of it

    def remember(self, describe: Callable[[], RankFailure]) -> None:
        """Keeps the first failure here, or the first that is no consequence, for the peers if there are any."""
        if not self._peers.awaited or (self._first is not None and not self._first.consequence):
            return
        failure = describe()
        if self._first is None or not failure.consequence:
            self._first = failure

    def tell(self) -> None:
        """Tells the peers why the ranks here are stopped."""
        if self._first is not None:
            self._peers.tell(self._first)

    def is_awaited(self, *, stopping: bool) -> bool:
        """Tells whether the peers' ranks may still be there. After a failure they are given the time to hear of it."""
        self._peers.finish()
        if stopping and self.farewell_at is None:
            self.tell()
            self.farewell_at = self._clock() + _FAREWELL_TIMEOUT
        return self._peers.awaited and not (self.farewell_at is not None and self._clock() >= self.farewell_at)
