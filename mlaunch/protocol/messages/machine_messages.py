"""The records between an agent and its link, and what of them goes on to the launcher.

link -> agent -> launcher Waiting, Refused, RankFailure
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
class Beat:
    """The link is there: its agent misses it as the other machines do."""


@frozen_record
class Done:
    """This machine's ranks are gone."""


@frozen_record
class AllGone:
    """Every machine's ranks are gone."""
