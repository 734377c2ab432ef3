"""The records that travel on each kind of channel, as types.

A channel is typed by what comes and what goes: ``Channel[RankSays, RankHears]`` is the agent's end of its channel to a
rank, ``Channel[RankHears, RankSays]`` the rank's. So a type checker finds a record that is sent to somebody who
does not take it, and one that a receiver forgets. For annotations alone: this imports every kind of record.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

from mlaunch.base.exceptions import RankFailure
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.control_messages import Question, Told
from mlaunch.protocol.messages.kept_messages import (
    CallOver,
    DirectCall,
    EndCall,
    EndRanks,
    MeetAgain,
    NextCall,
    RanksBack,
    RanksStand,
)
from mlaunch.protocol.messages.launch_messages import (
    AgentFailed,
    AgentStarted,
    AnswerFile,
    Cancel,
    DeadlinePassed,
    Finished,
    NamesLeft,
    NotReady,
    RankAnswered,
    RankGone,
    RanksStarting,
    RankStacks,
    RankStarted,
    Ready,
    Reaped,
    Release,
    RunCall,
    ServerGone,
)
from mlaunch.protocol.messages.machine_messages import (
    AllGone,
    Beat,
    Done,
    MachineSilent,
    Planned,
    Refused,
    Waiting,
)
from mlaunch.protocol.messages.part_messages import ForPart, PartSays
from mlaunch.protocol.messages.prepared_messages import BeginCall, CallBegun, PrepareNext
from mlaunch.protocol.messages.server_messages import CountDevices, DeviceCount, Free, Retire, ServeNext, StartLaunch
from mlaunch.protocol.messages.status_messages import StatusTold, TellStatus

# A caller and its fork server.
ServerHears = StartLaunch | PrepareNext | CountDevices | Retire
ServerSays = Ready | NotReady
CountingSays = DeviceCount  # a fork of the fork server that counts devices
# A launcher and the launch's agent. The fork server says the first word and the last one.
AgentHears = (BeginCall | Cancel | TellStatus) | (NextCall | EndCall | EndRanks | MeetAgain) | ForPart
AgentSays = (
    (AgentStarted | AgentFailed | CallBegun | RanksStarting | RankStarted | RankAnswered | RankStacks | RankGone)
    | (DeadlinePassed | ServerGone | NamesLeft | Finished | Reaped | StatusTold)
    | (CallOver | RanksStand | RanksBack | PartSays)
    | (Waiting | MachineSilent | Refused | RankFailure)
)
LaunchersEnd: TypeAlias = Channel[AgentSays, AgentHears]
AgentsEnd: TypeAlias = Channel[AgentHears, AgentSays]
# The fork server and an agent that it keeps for the next launch.
RestingAgentHears = ServeNext
RestingAgentSays = Free
# An agent and one of its ranks, which answers on the result queue; and this rank's control thread.
RankHears = RunCall | AnswerFile | Release | DirectCall
RankSays = NoReturn
ControlHears = Question | ForPart
ControlSays = Told
# An agent and its link to the other machines.
LinkHears = RankFailure | PartSays | Done
LinkSays = Waiting | Refused | RankFailure | Beat | Planned | AllGone | ForPart
