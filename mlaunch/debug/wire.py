"""Records about debuggers, and those between a rank and its debugger, on a channel of their own.

The debugger is the caller, with ``debug=True``, or a visitor, ``mlaunch debug``:

caller -> agent    HoldDeadline
caller -> agent -> rank    OpenPrompt            (attached: the rank's end of the channel)
visitor -> agent   COME, stop_word(2), QUIT      (a visitor's words, see protocol/registry.py)
agent -> rank      OpenPrompt, HoldLimits
agent -> caller    Visited
rank -> caller     PromptSays, PromptAsks, PromptLeft    (on that channel)
caller -> rank     PromptLine                            (the answer to PromptAsks)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias, cast

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.channel import Channel

NAME = "debug"  # of this feature
PROMPT = "pdb"
COME = "come"  # a visitor comes; while the connection is open, limits are lifted and the deadline is held
QUIT = "quit"  # the visitor ends the launch
_STOP = "stop "  # and a rank's number: it stops at its next line, and talks on this connection from then on


def stop_word(rank: int) -> str:
    """Return the word that asks a rank to stop."""
    return f"{_STOP}{rank}"


def rank_of(word: str) -> int | None:
    """Return the rank that a visitor asks to stop; None: the word is another one."""
    number = word.removeprefix(_STOP)
    return int(number) if word.startswith(_STOP) and number.isdecimal() else None


@frozen_record
class DebugTerms:
    """The way in which a launch's ranks are debugged: the feature's section of its spec.

    Attributes:
        way: PROMPT: each rank has a prompt where the call was made; "debugpy", "debugpy:0,2": these wait for an IDE;
            JSON: the address of an IDE that debugs the caller, as ``caller/__init__.py`` writes it.
    """

    way: str


def has_prompts(sections: Mapping[str, object]) -> bool:
    """True if the caller of the launch with these sections debugs its ranks."""
    terms = cast("DebugTerms | None", sections.get(NAME))
    return terms is not None and terms.way == PROMPT


@frozen_record
class OpenPrompt:
    """A message that gives a rank its end of a channel.

    ``at_once``: it stops at its next line; else at a breakpoint or failure. ``who``: "rank 1 of train()".
    """

    rank: int
    who: str = ""
    at_once: bool = False


@frozen_record
class HoldLimits:
    """A message that lifts the limits of later operations, as somebody debugs; ``held`` False restores them."""

    held: bool


@frozen_record
class PromptSays:
    """Text that the rank's debugger writes between two questions: whole lines."""

    text: str


@frozen_record
class PromptAsks:
    """A request for a line, for which the rank waits. ``prompt``: before the line.

    ``place``: where the rank has stopped, "/home/me/train.py:12 in train"; "" if user code calls ``input``.
    """

    prompt: str
    place: str


class Onward(enum.Enum):
    """The ways in which a rank leaves its prompt."""

    RUNS = "it continues"
    STEPS = "it takes a step, and is expected back"
    FAILS = "it reports its failure, which ends the launch"
    QUITS = "it runs no more code, and waits for its end"


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
    """A user is at a prompt: the call's deadline does not count until the same comes with ``held`` False."""

    held: bool


@frozen_record
class Visited:
    """``mlaunch debug`` debugs the launch or, with ``held`` False, no longer does. ``pid``: of that command."""

    held: bool
    pid: int


PromptHears = PromptLine
PromptTells = PromptSays | PromptAsks | PromptLeft
RanksEnd: TypeAlias = Channel[PromptHears, PromptTells]
DebuggersEnd: TypeAlias = Channel[PromptTells, PromptHears]
