"""The words of a debugger's prompt that the caller obeys; all others are the rank's, in which pdb has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SOME = re.compile(r"\s*ranks?\s+(?P<ranks>\d+(?:\s*,\s*\d+)*)\s+(?P<command>\S.*)")
_ALL = re.compile(r"\s*all\s+(?P<command>[^\s(=.\[].*)")  # not Python's: all(...), all = ..., all.x, all[0]
_SWITCH = re.compile(r"\s*switch\s+(?P<rank>\d+)\s*")


@dataclass(frozen=True)
class ForRanks:
    """A line for ranks. ``ranks`` empty: for all that have stopped. ``line`` None: there are no more."""

    ranks: tuple[int, ...]
    line: str | None


@dataclass(frozen=True)
class SwitchTo:
    """Gives another rank the prompt."""

    rank: int


@dataclass(frozen=True)
class TellWho:
    """Asks what each rank does."""


def parse(line: str, rank: int) -> ForRanks | SwitchTo | TellWho:
    """Returns what a line asks for that was typed at this rank's prompt."""
    if found := _ALL.fullmatch(line):
        return ForRanks((), found["command"])
    if found := _SOME.fullmatch(line):
        return ForRanks(tuple(sorted({int(number) for number in found["ranks"].split(",")})), found["command"])
    if found := _SWITCH.fullmatch(line):
        return SwitchTo(int(found["rank"]))
    return TellWho() if line.strip() == "who" else ForRanks((rank,), line)
