"""Records for features' parts between a link and the gate: how they look in the control protocol, and their meaning.

About a stop that all machines agree on ("unsure" is true if nobody knows whether ranks look for a stop at all):

link -> gate   {"stop": reason, "patience": seconds, "unsure": bool}, {"frozen": looks}
gate -> link   {"freeze": reason}, {"thaw": 1}, {"stop_at": look, "reason": reason}, {"unused": 1}

About other features. The gate passes these on unread: to the machine of rank 0, or from that one to all others:

link -> gate -> link   {"part": feature, "word": its record}
"""

from __future__ import annotations

from typing import cast

from mlaunch.agreed_stop.wire import (
    NAME,
    AskAll,
    FreezeRanks,
    NobodyLooks,
    RanksFrozen,
    StopOrder,
    StopRanks,
    ThawRanks,
    is_look,
)
from mlaunch.base.text import printable
from mlaunch.features import with_hook
from mlaunch.machines.wire.control_protocol import Record
from mlaunch.protocol.messages import ForPart, PartSays

_CALL = 0  # the number of the only call in such a launch
_REASON = 100  # bytes
_FEATURES = {feature.name for feature in with_hook("agent.part")}


def record_of(said: PartSays) -> Record:
    """Return the record that carries a part's news to the gate."""
    news = said.news
    if isinstance(news, dict):
        return {"part": said.feature, "word": news}
    if isinstance(news, RanksFrozen):
        return {"frozen": news.looks}
    ask = cast(AskAll, news)
    return {"stop": ask.reason, "patience": ask.patience, "unsure": ask.unsure}


def order_of(record: Record) -> ForPart | None:
    """Return what a record of the gate says to a feature; None if it is about something else, or is invalid."""
    word = record.get("word")
    if record.get("part") in _FEATURES and isinstance(word, dict):
        return ForPart(record["part"], _CALL, word)
    order = _order_of(record)
    return None if order is None else ForPart(NAME, _CALL, order)


def _order_of(record: Record) -> StopOrder | None:
    if "unused" in record:
        return NobodyLooks()
    if "thaw" in record:
        return ThawRanks()
    if "freeze" in record:
        return FreezeRanks(printable(str(record["freeze"]), _REASON))
    look = record.get("stop_at")
    if is_look(look):
        return StopRanks(look, printable(str(record.get("reason")), _REASON))
    return None
