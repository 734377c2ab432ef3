"""The records between a rank and who debugs it, on a channel of the rank's own: its caller, or ``mlaunch debug``.

rank -> caller    PromptSays, PromptAsks, PromptLeft
caller -> rank    PromptLine                              (the answer to PromptAsks)
caller -> agent   HoldDeadline                            (on the launch's own channel)
agent -> caller   Visited                                 (on the launch's own channel)
"""

from __future__ import annotations

import enum

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class PromptSays:
    """What a debugger writes between two questions: whole lines."""

    text: str


@frozen_record
class PromptAsks:
    """Asks for a line, and waits for it. ``prompt``: what stands before that.

    ``place``: where the rank has stopped, "/home/me/train.py:12 in train"; "" where user code calls ``input``.
    """

    prompt: str
    place: str


class Onward(enum.Enum):
    """How a rank leaves its prompt."""

    RUNS = "it runs on"
    STEPS = "it takes a step, and is expected back"
    FAILS = "it reports its failure, which ends the launch"
    QUITS = "it does nothing any more, and waits for its end"


@frozen_record
class PromptLeft:
    """The rank has left its prompt. ``place``: as in PromptAsks."""

    how: Onward
    place: str


@frozen_record
class PromptLine:
    """A line, without its end. None: there are no more lines."""

    text: str | None


@frozen_record
class HoldDeadline:
    """Says that a user is at a prompt: the call's deadline comes no nearer, until the same is said with False."""

    held: bool


@frozen_record
class Visited:
    """Says that somebody debugs the launch by ``mlaunch debug``, or, with ``held`` False, no more. ``pid``: who."""

    held: bool
    pid: int
