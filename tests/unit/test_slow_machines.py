"""What machines tell each other of slow ranks: it arrives as it was, in bounded lines, and noise does no harm."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from mlaunch.slow.agent import verdict_of_word, waits_of_word, word_of_verdict, word_of_waits
from mlaunch.slow.wire import SlowRanks, Waits, WaitsOfRank

MEMBERS = tuple(range(64))


def waits(count: int, lanes: int = 1, first: int = 0) -> WaitsOfRank:
    numbers = array("q", range(first, first + count))
    found = {f"{lane}": Waits(MEMBERS, numbers, array("d", [0.25] * count)) for lane in range(lanes)}
    return WaitsOfRank(2.0, 0.25 * count, found)


def travelled(word: dict[str, Any]) -> dict[str, Any]:
    line = json.dumps(word)
    assert len(line) < 60_000
    return dict(json.loads(line))


def test_waits_arrive() -> None:
    told = {4: waits(3), 5: waits(2)}
    assert waits_of_word(travelled(word_of_waits(7, told)), 7) == told
    assert waits_of_word(travelled(word_of_waits(7, told)), 8) == {}  # of the call before


def test_of_many_operations_machines_tell_the_same() -> None:
    """Though one has seen some more of them when it is asked, and of many groups there are those waited in most."""
    here = waits_of_word(travelled(word_of_waits(0, {rank: waits(4000, lanes=40) for rank in range(8)})), 0)
    there = waits_of_word(travelled(word_of_waits(0, {8: waits(4300, lanes=40)})), 0)
    assert len(here[0].lanes) == len(there[8].lanes) == 4
    [ours, *_], [theirs, *_] = here[0].lanes.values(), there[8].lanes.values()
    common = set(ours.numbers) & set(theirs.numbers)
    assert len(common) >= 7
    assert (here[0].elapsed, here[0].waited) == (2.0, 1000.0)


def test_a_verdict_arrives() -> None:
    slow = SlowRanks((4, 5), 0.9, 0.04, 0.3, 1e9, "ranks 4-5 are last")
    facts = {"text": "ranks 4-5 are last", "ranks": [4, 5], "share": 0.3}
    assert verdict_of_word(travelled(word_of_verdict(facts, slow))) == (facts, slow)
    assert verdict_of_word(travelled(word_of_verdict(facts, None))) == (facts, None)


@pytest.mark.parametrize(
    "noise",
    [
        {},
        {"call": 0},
        {"call": 0, "ranks": 5, "lanes": {}},
        {"call": 0, "ranks": {"x": [1, 1]}, "lanes": {}},
        {"call": 0, "ranks": {"1": [1]}, "lanes": {}},
        {"call": 0, "ranks": {"1": [1, 1]}, "lanes": {"a": [[0], {"2": [[1], [1]]}]}},
        {"call": 0, "ranks": {"1": [1, 1]}, "lanes": {"a": [[0], {"1": [[1e99], [1]]}]}},
        {"call": 0, "ranks": {"1": [1, 1]}, "lanes": [1]},
        {"facts": 1, "slow": None},
        {"facts": {}, "slow": {"ranks": [1]}},
        {"facts": {}, "slow": "x"},
    ],
)
def test_noise(noise: dict[str, Any]) -> None:
    assert waits_of_word(noise, 0) == {}
    assert verdict_of_word(noise) == ({}, None)
