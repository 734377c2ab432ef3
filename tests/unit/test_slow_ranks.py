"""Which ranks the others wait for: the comparison, on figures."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from mlaunch.slow.agent import Comparison
from mlaunch.slow.wire import Waits, WaitsOfRank

MEMBERS = (0, 1, 2, 3)


def compared(waits: Callable[[int, int], float], seconds: float = 30.0, steps: int = 30) -> Comparison:
    """Compare ranks that have waited, in each of so many steps of a second, for what ``waits(step, rank)`` says."""
    found = Comparison(seconds)
    for step in range(steps):
        for rank in MEMBERS:
            waited = waits(step, rank)
            lane = Waits(MEMBERS, array("q", [step]), array("d", [waited]))
            found.take(rank, WaitsOfRank(1.0, waited, {"0": lane}))
        found.conclude(float(step))
    return found


@pytest.mark.parametrize("slow", [(1,), (0, 3)])
def test_who_waits_least_is_slow(slow: tuple[int, ...]) -> None:
    found = compared(lambda _, rank: 0.02 if rank in slow else 0.12)
    verdict = found.verdict(0.05)
    assert verdict is not None
    assert (verdict.ranks, verdict.steadily) == (slow, True)
    assert (verdict.part, verdict.share) == (pytest.approx(0.1), pytest.approx(0.1))
    late = found.lateness(slow)
    assert late is not None
    assert (late.last, late.seconds, late.once) == (1.0, pytest.approx(0.1), 0.0)


def test_ranks_that_are_last_in_turn() -> None:
    """Who gets more to do at random, as with sequences of different lengths, is not slow."""
    chance = random.Random(0)
    found = compared(lambda _step, _rank: chance.random())
    verdict = found.verdict(0.3)
    assert verdict is not None
    assert not verdict.steadily


def test_one_long_wait() -> None:
    """A checkpoint that one rank writes, or a stop: told as such, and no reason to tell by oneself."""
    found = compared(lambda step, rank: 2.0 if step == 17 and rank != 2 else 0.001)
    verdict = found.verdict(0.05)
    assert verdict is not None
    assert (verdict.ranks, verdict.steadily) == ((2,), False)
    assert verdict.part > 0.05
    late = found.lateness((2,))
    assert late is not None
    assert late.once == pytest.approx(1.999)


def test_a_rank_that_tells_late() -> None:
    """One that was stopped has told nothing meanwhile, and then of all the time."""
    found = Comparison(30.0)
    for step in range(12):
        for rank in MEMBERS:
            stopped = rank == 1 and step in {5, 6}
            seconds = 3.0 if rank == 1 and step == 7 else 1.0
            if not stopped:
                found.take(rank, WaitsOfRank(seconds, 0.0 if rank == 1 or step != 7 else 2.0, {}))
        found.conclude(float(step))
    verdict = found.verdict(0.05)
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert verdict.part == pytest.approx(2 / 12)


def test_what_is_old_does_not_count() -> None:
    found = compared(lambda step, rank: 0.2 if step < 20 and rank else 0.1, seconds=5.0)
    verdict = found.verdict(0.05)
    assert verdict is not None
    assert verdict.part == pytest.approx(0.0)


def test_nothing_to_compare() -> None:
    found = Comparison(30.0)
    assert found.verdict(0.1) is None
    assert not found.waits
    found.take(0, WaitsOfRank(1.0, 0.5, {}))
    found.conclude(0.0)
    assert found.verdict(0.1) is None  # of one rank alone
    assert found.lateness((0,)) is None
