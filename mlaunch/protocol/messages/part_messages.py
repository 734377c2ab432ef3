"""The records that features' parts in the processes of a launch send each other.

caller -> agent, agent -> rank, link -> agent   ForPart
agent -> rank                                   PartAsks       (in a Question, which the rank answers)
agent -> caller, agent -> link, member -> caller   PartSays
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class ForPart:
    """A word for a feature's part. ``call``: the number of the call that it is about."""

    feature: str
    call: int
    word: object


@frozen_record
class PartAsks:
    """Asks a feature's part of a rank, whatever that rank's main thread does."""

    feature: str
    about: object


@frozen_record
class PartSays:
    """What a feature's part has for its part nearer to the caller."""

    feature: str
    news: object
