"""The records of ranks that stay.

launcher -> agent   NextCall, EndCall, EndRanks
launcher -> rank    DirectCall                      (instead of NextCall, where no deadline is to be kept)
rank -> launcher    DirectAnswer                    (to such a call, if it is a small value)
agent -> launcher   CallOver
agent <-> rank      TellNumbers                     (a channel of its own, which a thread of the rank answers)
"""

from __future__ import annotations

from dataclasses import dataclass

from mlaunch.protocol.messages import RankAnswered

# Plain tuples: to find a class for each record would cost processes that wake for a short call too much.

# The call's number, and the call; if it is empty, that is in the attached memfd.
DirectCall = tuple[int, bytes]
# The local rank, the call's number, the modules as in Answer, and the value.
DirectAnswer = tuple[int, int, str, bytes]


@dataclass(frozen=True)
class NextCall:
    """Has ranks that stay run their next call. ``data``: the call; if it is empty, that is in the attached memfd.

    ``deadline``: seconds, None: no limit.
    """

    number: int
    deadline: float | None
    data: bytes = b""


@dataclass(frozen=True)
class EndCall:
    """Asks to end this call as Ctrl-C would, and to find out whether the ranks can go on. An older one's is over."""

    number: int


@dataclass(frozen=True)
class CallOver:
    """All ranks that stay have come back from a call, and can take the next one.

    ``answers``: the last ones, up to as many as a record can carry the memfds of. Attached, in this order: those of
    answers without data.
    """

    number: int
    answers: tuple[RankAnswered, ...] = ()


@dataclass(frozen=True)
class EndRanks:
    """Asks ranks that stay to leave; they are stopped after the grace period."""


@dataclass(frozen=True)
class TellNumbers:
    """Asks for the numbers of the operations that a rank has entered since a call began, and says that they are told.

    Attached to the question: the memfd for the answer.
    """

    call: int
    question: int = 0  # its number, as the agent counts
