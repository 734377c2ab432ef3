"""The records between an agent and its link to the other machines; what of them goes on to the launcher.

link -> agent -> launcher Waiting, Refused, RankFailure
link -> agent             Beat, Planned, AllGone, ForPart
agent -> link             RankFailure, Done, PartSays
"""

from __future__ import annotations

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import ForPart, PartSays, Refused, Waiting
from mlaunch.protocol.spec import Agreed


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


LinkHears = RankFailure | PartSays | Done
LinkSays = Waiting | Refused | RankFailure | Beat | Planned | AllGone | ForPart
