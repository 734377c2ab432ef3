"""The messages between the parts that look for slow ranks.

On several machines, each agent sends the waits of its ranks to the agent of rank 0, which compares all and sends the
others the result (``agent.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from mlaunch.base.frozen_record import frozen_record

NAME = "slow"


@frozen_record
class SlowTerms:
    """The terms by which ranks count as slow.

    Attributes:
        share: The share of their time for which the others must wait for them.
        seconds: For how long they must do so before the user sees it.
        every: Seconds between two comparisons.
    """

    share: float
    seconds: float
    every: float


@frozen_record
class TellWaits:
    """agent -> rank: the question how long it has waited since the last time."""


@frozen_record
class Waits:
    """A rank's waits in the collectives of one group, or the steps of one model; members number them in the same way.

    Attributes:
        members: Global ranks.
        numbers: The numbers of the operations; some may be left out.
        waits: The seconds that the rank has waited in each.
    """

    members: tuple[int, ...]
    numbers: array[int]
    waits: array[float]


@frozen_record
class WaitsOfRank:
    """rank -> agent: its waits since the last time.

    Attributes:
        elapsed: Seconds since then, on its own clock.
        waited: How many of them it waited for others.
        lanes: The waits by lane, by names that all members know.
    """

    elapsed: float
    waited: float
    lanes: Mapping[str, Waits]


@frozen_record
class SlowRanks:
    """agent -> caller, and in the report: the others have waited for these ranks for as long as ``slow=`` says.

    Attributes:
        ranks: Global ranks.
        last: The share of the collectives in which they were last, from 0 to 1.
        seconds: By how much the others waited longer in each, on average.
        share: The share of the others' time that this was, from 0 to 1.
        since: When it began, in seconds of the epoch.
        text: All of this in words.
    """

    ranks: tuple[int, ...]
    last: float
    seconds: float
    share: float
    since: float
    text: str

    def __str__(self) -> str:
        return self.text
