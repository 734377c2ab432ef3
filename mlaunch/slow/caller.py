"""The caller's part of ``slow=``: its terms, and the note that its user sees."""

from __future__ import annotations

from typing import Any

from mlaunch.caller.options.option_values import parse_share
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.core.records import Note, Noticed
from mlaunch.slow.wire import SlowRanks, SlowTerms

SECONDS = 30.0  # for which ranks must be slow before the user sees it
EVERY = 2.0  # seconds between two comparisons


def part(options: Any, _spell: Spell) -> CallerPart:
    """Make the caller's part: the terms by which the agents of each attempt compare ranks."""
    made = CallerPart()
    made.section = SlowTerms(parse_share(options.slow), SECONDS, EVERY)
    return made


def noted(news: object, name: str) -> Note:
    """Return the note that a launch of this name makes of its agent's news."""
    if isinstance(news, SlowRanks):
        facts = {"ranks": list(news.ranks), "last": news.last, "seconds": news.seconds, "share": news.share,
                 "since": news.since}  # fmt: skip
        event = Noticed("slow", news.text, facts)
        return Note(f"{name}: {news.text}", {"slow_ranks": news}, event=event)
    return Note()
