"""Whether ranks make progress, and whether they work though they make none. Pure functions on what agents tell.

Progress is a phase, a turn of ``mlaunch.progress``, a look (``mlaunch.stopping``) or an operation of a process group.
Ranks that make none for long may compile, evaluate or write a checkpoint. So all are asked twice for where they are and
what they have used, and whoever got anywhere works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.base.text import in_two_units, name_some_ranks
from mlaunch.insight.caller.why_text import has_returned, is_outside, sentence, view_of
from mlaunch.protocol.messages import Phase

Ranks = Sequence[Mapping[str, Any]]  # each as its agent tells of it
APART = 1.0  # seconds between the two
# Seconds for which who waits for something outside (a service, a disk, a child) must not have stirred.
_PATIENCE = 5.0
_IN_USER_CODE = {Phase.RUNNING.value, Phase.COMMANDED.value}
_LEAST_CPU = {"main": 0.05, "threads": 0.2, "children": 0.05}  # seconds that answering us does not take
_LEAST_BYTES = 65536
_TOLD = 2  # places that a sentence on who waits for whom tells


def run(ranks: Ranks) -> bool:
    """Tells whether some rank has a call that it has not answered; one that has may wait for others."""
    return any(_is_in_code(rank) or (is_outside(rank) and not has_returned(rank)) for rank in ranks)


def _is_in_code(rank: Mapping[str, Any]) -> bool:
    return rank.get("marks", [""])[0] in _IN_USER_CODE


def moved(before: Ranks, now: Ranks) -> bool:
    """Tells whether a rank has made progress. What one has not told says nothing."""
    known = {rank["rank"]: rank.get("marks", []) for rank in before}
    return any(
        was is not None and is_now is not None and was != is_now
        for rank in now
        for was, is_now in zip(known.get(rank["rank"], []), rank.get("marks", []), strict=False)
    )


def counted(before: Ranks, now: Ranks) -> bool:
    """Tells whether a rank has made turns, looked or entered operations in the user's code: such ranks show progress.

    A phase is none: a rank that is slow to start comes to its function, which may show none.
    """
    known = [rank for rank in before if _is_in_code(rank)]
    there = [{**rank, "marks": rank["marks"][1:]} for rank in now if _is_in_code(rank)]
    return moved([{**rank, "marks": rank["marks"][1:]} for rank in known], there)


def has_begun(ranks: Ranks) -> bool:
    """Tells whether ranks show progress at all: a function that only waits, or serves, shows none and need not.

    On the way to the function, and from there, each step is one.
    """
    views = [view_of(rank) for rank in ranks]
    numbers = {group: number for view in views for group, (_, number) in (view.entered or {}).items()}
    unequal = any(numbers[group] != there for view in views for group, (_, there) in (view.entered or {}).items())
    counts = any(mark for rank in ranks for mark in rank["marks"][1:4])
    return (
        unequal
        or counts
        or any(view.operation or (view.is_free is False and view.waits) for view in views)
        or any(is_outside(rank) for rank in ranks)
    )


def patience(ranks: Ranks, limit: float) -> float:
    """Returns for how long ranks are looked at before they have stalled. ``limit``: what ``stall=`` says."""
    busy = _who_may_spin(ranks)
    outside = any(_is_outside_of_us(rank) for rank in ranks if rank["rank"] not in busy)
    return max(_PATIENCE, limit / 4) if outside else APART


def _is_outside_of_us(rank: Mapping[str, Any]) -> bool:
    """True if the kernel holds its main thread elsewhere than in a lock."""
    return bool(rank.get("asleep")) and "futex" not in rank["asleep"]


def stirred(first: Ranks, now: Ranks) -> bool:
    """True if the main thread of a rank that waits for no other has begun to wait anew: for a packet, for a moment."""
    known, busy = {rank["rank"]: rank.get("activity", {}) for rank in first}, _who_may_spin(now)
    return any(
        rank["activity"].get("switches", 0) > known[rank["rank"]].get("switches", 0)
        for rank in now
        # A signal asks those that do not answer, and wakes them.
        if rank["rank"] in known
        and rank["rank"] not in busy
        and rank.get("entered") is not None
        and rank.get("activity")
    )


def work(first: Ranks, second: Ranks) -> bool:
    """Tells whether a rank does anything, by two looks ``APART``."""
    known, spin = {rank["rank"]: rank for rank in first}, _who_may_spin(second)
    return moved(first, second) or any(
        _works(known[rank["rank"]], rank, spins=rank["rank"] in spin) for rank in second if rank["rank"] in known
    )


def _who_may_spin(ranks: Ranks) -> set[int]:
    """Returns those who may burn a CPU as they wait, as NCCL does: in an operation, or for one that a device does."""
    views = [view_of(rank) for rank in ranks]
    numbers: dict[str, list[int]] = {}
    for view in views:
        for group, (_, number) in (view.entered or {}).items():
            numbers.setdefault(group, []).append(number)
    return {
        view.rank
        for view in views
        if view.operation
        or (view.is_free is False and view.waits)
        or any(number > min(numbers[group]) for group, (_, number) in (view.entered or {}).items()
               if not group.endswith(" cpu"))
    }  # fmt: skip


def _works(was: Mapping[str, Any], now: Mapping[str, Any], *, spins: bool) -> bool:
    if was["frames"] and now["frames"] and was["frames"] != now["frames"]:
        return True
    if "activity" not in was or "activity" not in now:
        return True  # it was being started, so nobody has asked what it uses
    used = {kind: now["activity"].get(kind, 0) - was["activity"].get(kind, 0) for kind in (*_LEAST_CPU, "bytes")}
    own = () if spins else ("main", "threads")
    return used["bytes"] >= _LEAST_BYTES or any(used[kind] >= _LEAST_CPU[kind] for kind in (*own, "children"))


def stalled(seconds: float, ranks: Ranks) -> str:
    """Says it in one sentence: "has made no progress for 5 min 0 s: rank 1 has not entered ..."."""
    return f"made no progress for {in_two_units(seconds)}: {sentence(ranks)}"


def places(ranks: Ranks) -> list[str]:
    """Says where all are, a line for those at the same place; nothing where the sentence says it all."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(view_of(rank).doing, []).append(rank["rank"])
    lines = [f"{name_some_ranks(those)} {'is' if len(those) == 1 else 'are'} {doing}" for doing, those in found.items()]
    waits = any(view_of(rank).operation for rank in ranks)
    return [] if waits and len(lines) <= _TOLD else lines
