"""The records of ranks that stay.

launcher -> agent   NextCall, EndCall, EndRanks, MeetAgain
launcher -> rank    DirectCall                      (instead of NextCall, where all ranks are on this machine)
rank -> launcher    DirectAnswer                    (to such a call, if it is a small value)
agent -> launcher   CallOver                        (if other machines have ranks, too: RanksStand, RanksBack)
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages.launch_messages import RankAnswered

# Plain tuples: to find a class for each record would cost processes that wake for a short call too much.

# The call's number, and the call; if it is empty, that is in the attached memfd.
DirectCall = tuple[int, bytes]
# The local rank, the call's number, the modules as in Answer, and the value.
DirectAnswer = tuple[int, int, str, bytes]


@frozen_record
class NextCall:
    """Makes ranks that stay run their next call. ``data``: the call; empty: it is in the attached memfd.

    ``deadline``: seconds, None: no limit.
    """

    number: int
    deadline: float | None
    data: bytes = b""


@frozen_record
class EndCall:
    """Asks to end this call as Ctrl-C would, and to find out whether the ranks can go on. An older one's is over.

    ``late``: seconds of its deadline, which its launcher has kept and which has passed; None: it is ended otherwise.
    """

    number: int
    late: float | None = None


@frozen_record
class CallOver:
    """All ranks that stay have come back from a call, and can take the next one.

    ``answers``: the last ones, up to as many as a record can carry the memfds of. Attached, in this order: those of
    answers without data.
    """

    number: int
    answers: tuple[RankAnswered, ...] = ()


@frozen_record
class RanksStand:
    """Tells where a machine's ranks stand in a call that is to end. ``back``: global ranks that have come back from it.

    Attached: a memfd with the numbers of those that have told them, by global rank. The launcher, who hears all
    machines, finds out whether somebody works in vain.
    """

    number: int
    back: tuple[int, ...]


@frozen_record
class RanksBack:
    """A machine's ranks have come back from a call that did not end by itself. Attached: as of RanksStand, of all.

    It is for the launcher to compare these.
    """

    number: int


@frozen_record
class MeetAgain:
    """Says that the numbers of all machines' ranks agree: they are to meet, after which this call is over."""

    number: int


@frozen_record
class EndRanks:
    """Asks ranks that stay to leave; they are stopped after the grace period."""
