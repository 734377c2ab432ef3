"""Types of the records that are sent over each kind of byte stream, as ``channels.py`` has those of channels.

Only for annotations: this imports every kind of record.
"""

from __future__ import annotations

from typing import TypeAlias

from mlaunch.engines.wire.first_process import Carried, Lead
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.engines.wire.member_messages import (
    Alive,
    AskOffer,
    FromAgent,
    Heartbeat,
    Listen,
    MachineDone,
    MemberAnswer,
    Printed,
    Reach,
    Reports,
    Rows,
    ServerEnded,
    Start,
)
from mlaunch.protocol.messages import Cancel, EndCall, EndRanks, ForPart, MeetAgain, NextCall, PartSays, Question

# A caller and a member, which also receives the records for its launch's agent.
MemberHears = (
    (Heartbeat | AskOffer | Listen | Reach | Start)
    | (Cancel | Question | NextCall | EndCall | MeetAgain | EndRanks | ForPart)
)  # fmt: skip
MemberSays = (
    MemberAnswer
    | (FromAgent | Printed | Rows | Reports | Alive | ServerEnded | PartSays | MachineDone)
)  # fmt: skip
CallersStream: TypeAlias = FrameStream[MemberSays, MemberHears]
MembersStream: TypeAlias = FrameStream[MemberHears, MemberSays]
# A caller and the first of the processes that an engine's program has started, which carries the streams of all.
CarriersStream: TypeAlias = FrameStream[Lead | Carried, Carried]
CarriedStream: TypeAlias = FrameStream[Carried, Lead | Carried]
