"""What the parts that look for slow ranks send each other.

Over several machines each agent sends what its ranks have waited for to the agent of rank 0, which compares all, and
sends the others what came of it (``agent/other_machines.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from mlaunch.base.frozen_record import frozen_record

NAME = "slow"


@frozen_record
class SlowTerms:
    """From what on ranks are slow.

    Attributes:
        share: Of the others' time, which they wait for them.
        seconds: For which they do, before the user sees it.
        every: Seconds between two comparisons.
    """

    share: float
    seconds: float
    every: float


@frozen_record
class TellWaits:
    """agent -> rank: what have you waited for since the last time?"""


@frozen_record
class Waits:
    """How long a rank has waited in the collectives of one group, or the steps of one model: members number them alike.

    Attributes:
        members: Global ranks.
        numbers: Of the operations; some may be left out.
        waits: Seconds that it waited in each.
    """

    members: tuple[int, ...]
    numbers: array[int]
    waits: array[float]


@frozen_record
class WaitsOfRank:
    """rank -> agent: what it has waited for since the last time.

    Attributes:
        elapsed: Seconds since then, on its own clock.
        waited: In how many of them it waited for others.
        lanes: In what, by names that all members know.
    """

    elapsed: float
    waited: float
    lanes: Mapping[str, Waits]


@frozen_record
class SlowRanks:
    """agent -> caller, and in the report: the others have waited for these ranks for as long as ``slow=`` says.

    Attributes:
        ranks: Global ranks.
        last: In which share of the collectives they were last, from 0 to 1.
        seconds: By which the others waited longer in each, on average.
        share: Of the others' time, which that was, from 0 to 1.
        since: Seconds of the epoch.
        text: All of it, for people.
    """

    ranks: tuple[int, ...]
    last: float
    seconds: float
    share: float
    since: float
    text: str

    def __str__(self) -> str:
        return self.text
