"""The messages between the agents of several machines, as JSON. Each agent checks what it receives."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlaunch.base.text import printable
from mlaunch.slow.wire import SlowRanks, Waits, WaitsOfRank

_LANES = 4  # lanes that a machine reports: those in which its ranks wait longest
_ROWS = 16  # operations of each
_MICROSECONDS = 1e6
_TEXT = 500  # bytes


def word_of_waits(call: int, waits: Mapping[int, WaitsOfRank]) -> dict[str, Any]:
    """Return the message about the waits of this machine's ranks, by global rank. It has a part of the operations."""
    ranks = {rank: [told.elapsed, told.waited] for rank, told in waits.items()}
    lanes = sorted({name for told in waits.values() for name in told.lanes})
    lanes.sort(key=lambda name: -sum(sum(told.lanes[name].waits) for told in waits.values() if name in told.lanes))
    rows = {}
    for name in lanes[:_LANES]:
        own = {rank: told.lanes[name] for rank, told in waits.items() if name in told.lanes}
        step = _step(max(len(lane.numbers) for lane in own.values()))
        members = next(iter(own.values())).members
        rows[name] = [members, {rank: _thinned(lane, step) for rank, lane in own.items() if lane.members == members}]
    return {"call": call, "ranks": ranks, "lanes": rows}


def waits_of_word(word: Mapping[str, Any], call: int) -> dict[int, WaitsOfRank]:
    """Read a message of ``word_of_waits``; {} if it is about another call, or is malformed."""
    try:
        if word["call"] != call:
            return {}
        lanes: dict[int, dict[str, Waits]] = {int(rank): {} for rank in word["ranks"]}
        for name, (members, told) in word["lanes"].items():
            for rank, (numbers, waits) in told.items():
                seconds = array("d", [wait / _MICROSECONDS for wait in waits])
                lanes[int(rank)][name] = Waits(tuple(map(int, members)), array("q", numbers), seconds)
        return {
            int(rank): WaitsOfRank(float(elapsed), float(waited), lanes[int(rank)])
            for rank, (elapsed, waited) in word["ranks"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def word_of_verdict(facts: Mapping[str, object], slow: SlowRanks | None) -> dict[str, Any]:
    """Return the message with the facts that ``mlaunch ps`` shows on each machine, and the slow ranks to report now."""
    return {"facts": dict(facts), "slow": None if slow is None else asdict(slow)}


def verdict_of_word(word: Mapping[str, Any]) -> tuple[dict[str, object], SlowRanks | None]:
    """Read a message of ``word_of_verdict``; no facts if it is malformed."""
    try:
        facts = {str(name): _fact(value) for name, value in word["facts"].items()}
        if (slow := word["slow"]) is None:
            return facts, None
        last, seconds, share, since = (float(slow[name]) for name in ("last", "seconds", "share", "since"))
        ranks, text = tuple(map(int, slow["ranks"])), printable(str(slow["text"]), _TEXT)
        return facts, SlowRanks(ranks, last, seconds, share, since, text)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}, None


def _fact(value: object) -> object:
    return value if isinstance(value, int | float) else printable(str(value), _TEXT)


def _step(count: int) -> int:
    """Return n to send each n-th operation. It is a power of two, so that all machines send the same operations."""
    step = 1
    while count > _ROWS * step:
        step *= 2
    return step


def _thinned(waits: Waits, step: int) -> list[list[int]]:
    rows = [row for row in zip(waits.numbers, waits.waits, strict=True) if row[0] % step == 0]
    return [[number for number, _ in rows], [round(waited * _MICROSECONDS) for _, waited in rows]]
