"""What a link and the gate say of a stop that all machines agree on: records of the control protocol, and their sense.

link -> gate   {"stop": reason, "patience": seconds, "unsure": whether ranks look at all}, {"frozen": looks}
gate -> link   {"freeze": reason}, {"thaw": 1}, {"stop_at": look, "reason": reason}, {"unused": 1}
"""

from __future__ import annotations

from mlaunch.base.text import printable
from mlaunch.protocol.agreed_stop import is_look
from mlaunch.protocol.messages.stop_messages import (
    AskAll,
    FreezeRanks,
    NobodyLooks,
    RanksFrozen,
    StopOrder,
    StopRanks,
    ThawRanks,
)
from mlaunch.rendezvous.control_protocol import Record

_CALL = 0  # the number of the one call of such a launch
_REASON = 100  # bytes


def record_of(said: AskAll | RanksFrozen) -> Record:
    """Returns what is sent to the gate."""
    if isinstance(said, RanksFrozen):
        return {"frozen": said.looks}
    return {"stop": said.reason, "patience": said.patience, "unsure": said.unsure}


def order_of(record: Record) -> StopOrder | None:
    """Reads what the gate wants of ranks; None if the record is about something else, or makes no sense."""
    if "unused" in record:
        return NobodyLooks()
    if "thaw" in record:
        return ThawRanks(_CALL)
    if "freeze" in record:
        return FreezeRanks(_CALL, printable(str(record["freeze"]), _REASON))
    look = record.get("stop_at")
    if is_look(look):
        return StopRanks(_CALL, look, printable(str(record.get("reason")), _REASON))
    return None
