"""The records between an agent and the control thread of each of its ranks, on a channel of the rank's own.

agent -> rank   Question                        (attached: the memfd for the answer)
rank -> agent   Told                            (the answer is in that memfd)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TellNumbers:
    """Asks for the numbers of the operations that a rank has entered since a call began."""

    call: int


@dataclass(frozen=True)
class Question:
    """Asks a rank something, whatever its main thread does. ``number``: as the agent counts questions."""

    number: int
    about: TellNumbers


@dataclass(frozen=True)
class Told:
    """Says that the question of this number is answered."""

    number: int
