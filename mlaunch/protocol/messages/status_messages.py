"""The records by which a launcher asks its launch what ``mlaunch why`` would, on the launch's own channel.

launcher -> agent   TellStatus
agent -> launcher   StatusTold   (attached: a status in JSON)
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class TellStatus:
    """Asks for a status. ``word``: as a visitor would say it (``visitors.py``)."""

    number: int
    word: bytes


@frozen_record
class StatusTold:
    """Answers the question of this number."""

    number: int
