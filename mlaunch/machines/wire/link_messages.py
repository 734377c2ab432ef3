"""The records between an agent and its link, and which of them the agent passes on to the launcher.

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
    """The plan: all machines have joined. ``interface``: this machine's network interface to the master."""

    agreed: Agreed
    interface: str


@frozen_record
class Beat:
    """A heartbeat of the link. Without it, the agent counts the link as lost, as other machines do."""


@frozen_record
class Done:
    """The agent's message that this machine's ranks are gone."""


@frozen_record
class AllGone:
    """The link's message that every machine's ranks are gone."""


LinkHears = RankFailure | PartSays | Done
LinkSays = Waiting | Refused | RankFailure | Beat | Planned | AllGone | ForPart
