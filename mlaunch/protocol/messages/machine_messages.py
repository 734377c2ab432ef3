"""The records between an agent and its link, and what of them goes on to the launcher.

link -> agent -> launcher Waiting, Refused, RankFailure
link -> agent -> launcher ClockCompared                         (for a profile)
link -> agent             Beat, Planned, Over
agent -> link             RankFailure, Done

MachineSilent comes from the caller's own thread that hears the machines of an engine.
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.spec import Agreed


@frozen_record
class Waiting:
    """What the launch waits for while machines join, for people."""

    text: str


@frozen_record
class MachineSilent:
    """One says nothing any more, for people."""

    text: str


@frozen_record
class Refused:
    """The machines do not come together, and why. ``late``: because the time for it is over."""

    text: str
    late: bool = False


@frozen_record
class Planned:
    """All machines have joined. ``interface``: this machine's, on the way to the master."""

    agreed: Agreed
    interface: str


@frozen_record
class ClockCompared:
    """What a machine's clock differs by from that of the gate's machine. Seconds, those of the epoch by its own clock.

    ``at``: when that was; ``ahead``: by how much the gate's is ahead; ``error``: by how much that may be wrong, half of
    the time that question and answer took; ``begun``: when the launch began, by the gate's clock; ``epoch``: what makes
    seconds of its clock of monotonic ones of who hears this.
    """

    rank_start: int
    ranks: int  # of this machine
    at: float
    ahead: float
    error: float
    begun: float
    epoch: float


@frozen_record
class Beat:
    """The link is there: its agent misses it as the other machines do."""


@frozen_record
class Done:
    """This machine's ranks are gone."""


@frozen_record
class AllGone:
    """Every machine's ranks are gone."""
