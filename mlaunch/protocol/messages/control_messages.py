"""The records between an agent and the control thread of each of its ranks, on a channel of the rank's own.

agent -> rank   Question                        (attached: the memfd for the answer)
agent -> rank   ForPart                         (of part_messages.py, as PartAsks is; attached: what its feature sends)
rank -> agent   Told                            (the answer is in that memfd)
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages.part_messages import PartAsks


@frozen_record
class TellNumbers:
    """Asks for the numbers of the operations that a rank has entered since a call began."""

    call: int


@frozen_record
class TellTurns:
    """Asks how often the rank's function has come by what features count: a larger number is progress."""


@frozen_record
class TellEntered:
    """Asks for the number of the latest operation that the rank has entered in each of its process groups."""


@frozen_record
class TellPlace:
    """Asks where the rank's main thread is: its Python frames, as ``stack_dump.main_frames`` returns them."""


About = TellNumbers | TellEntered | TellTurns | TellPlace | PartAsks


@frozen_record
class Question:
    """Asks a rank something, whatever its main thread does. ``number``: as the agent counts questions."""

    number: int
    about: About


@frozen_record
class Told:
    """Says that the question of this number is answered."""

    number: int
