"""What an agent will do for a call, done once for nothing by one that was prepared; see ``rank/rehearsal.py``."""

from __future__ import annotations

from typing import Any

from mlaunch.agent.rank_process import RankProcess
from mlaunch.base.fds import close_all, memory_file
from mlaunch.protocol.channel import Channel, pickled
from mlaunch.protocol.messages.launch_messages import (
    Answer,
    AnswerKind,
    Finished,
    Phase,
    RankAnswered,
    RankGone,
    RunCall,
)
from mlaunch.protocol.messages.prepared_messages import BeginCall, CallBegun, Details
from mlaunch.protocol.result_queue import ResultQueue


def rehearse() -> None:
    """Takes a call from a channel of its own and passes it on, takes an answer from a queue and passes that on."""
    ours: Channel[Any, Any]  # each record of it is of a channel of its own
    ours, theirs = Channel.pair()
    queue: ResultQueue[Answer] = ResultQueue()
    rank = RankProcess(0, 0, 0, -1, ours, -1, -1)
    call_fd = memory_file("rehearsal")
    ours.send(BeginCall(Details("", None, None, None, rank0_only=False, argv=())), [call_fd])
    begin, begun = theirs.receive()
    rank.begin_call(pickled(RunCall(0, attached=True, details=begin.details)), begun)
    _, passed = theirs.receive()
    queue.put(Answer(0, 0, AnswerKind.VALUE, data=b"."))
    for answer in queue.drain():
        rank.take(answer)
    answered = RankAnswered(0, 0, AnswerKind.VALUE, consequence=False, at=0.0, data=b".")
    gone = RankGone(0, 0, 0, Phase.LEAVING, answered=True, stopped=False, at=0.0)
    for record in (CallBegun(), answered, gone, Finished()):
        ours.try_send(record, [call_fd])
    close_all([call_fd, *begun, *passed])
    rank.close()
    theirs.close()
    queue.close()
