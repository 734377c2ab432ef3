"""What a supervisor is given, and what it knows of the call that is running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlaunch.agent.inspection import Inspection
from mlaunch.agent.peers import Peers
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.system import System
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.launch_messages import Errand
from mlaunch.protocol.messages.prepared_messages import Details
from mlaunch.protocol.result_queue import Results
from mlaunch.rendezvous.store_process import StoreProcess


@dataclass(frozen=True)
class Supervision:
    """Everything that a supervisor watches. ``parent``: a pidfd of the process that must outlive it."""

    ranks: Sequence[RankProcess]
    results: Results
    server: StoreProcess | None
    launcher: Channel
    parent: int
    grace_period: float  # seconds
    inspection: Inspection | None = None
    peers: Peers = field(default_factory=Peers)
    system: System = field(default_factory=System)
    stop_on: tuple[int, ...] = ()  # as in LaunchSpec
    stop_grace: float = 300.0


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
