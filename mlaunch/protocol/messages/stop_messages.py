"""The records of a stop that all ranks agree on.

launcher -> agent   AskToStop
launcher -> agent   FreezeRanks, ThawRanks, StopRanks    (an engine's caller, who agrees with all machines)
agent -> launcher   RanksFrozen                          (to such a caller)
agent -> launcher   StopAgreed, StopOverdue
agent -> link       AskAll, RanksFrozen                  (of machines with a caller each: the gate agrees with them)
link -> agent       FreezeRanks, ThawRanks, StopRanks, NobodyLooks
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class AskToStop:
    """Asks the ranks to stop at a step of this call that they agree on. ``reason``: what ``stopping()`` returns."""

    call: int
    reason: str


@frozen_record
class AskAll:
    """Asks the ranks of all machines to stop.

    ``patience``: seconds after which machines that cannot answer are left out. ``unsure``: whether their ranks call
    ``stopping()`` is not known, and if none has, it is told that.
    """

    reason: str
    patience: float
    unsure: bool


@frozen_record
class NobodyLooks:
    """No rank of any machine has called ``stopping()``."""


@frozen_record
class FreezeRanks:
    """Lets the ranks' next looks wait, and asks how many there were. ``reason``: why they are to stop."""

    call: int
    reason: str


@frozen_record
class RanksFrozen:
    """All of a machine's ranks that still work wait at their next look. ``looks``: the most that one has had."""

    call: int
    looks: int


@frozen_record
class ThawRanks:
    """Lets them go on: a machine has not answered, and is asked again."""

    call: int


@frozen_record
class StopRanks:
    """Says at which look the ranks of all machines stop."""

    call: int
    look: int
    reason: str


@frozen_record
class StopAgreed:
    """The ranks stop at their look of this number. ``asked``: when that was asked for, in seconds of the epoch."""

    reason: str
    asked: float
    look: int


@frozen_record
class StopOverdue:
    """Half of the time to stop is over, and ranks go on: why, for people. ``left``: seconds that remain."""

    why: str
    seconds: float
    left: float


StopOrder = FreezeRanks | ThawRanks | StopRanks | NobodyLooks  # of the gate
