"""Signs of progress in ranks, and of work without progress. Pure functions on agents' answers.

Progress is a phase, a turn of ``mlaunch.progress``, a call of ``mlaunch.stopping`` or an operation of a process group.
Ranks that make none for long may compile, evaluate or write a checkpoint. So all are asked twice for their places and
resources: a rank works if these have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.base.text import in_two_units, name_some_ranks
from mlaunch.insight.caller.why_text import has_returned, is_outside, sentence, view_of
from mlaunch.protocol.messages import Phase

Ranks = Sequence[Mapping[str, Any]]  # each as in its agent's answer
APART = 1.0  # seconds between the two
# Seconds without a sign of life from a rank that waits for something outside (a service, a disk, a child).
_PATIENCE = 5.0
_IN_USER_CODE = {Phase.RUNNING.value, Phase.COMMANDED.value}
_LEAST_CPU = {"main": 0.05, "threads": 0.2, "children": 0.05}  # seconds, more than answering takes
_LEAST_BYTES = 65536
_TOLD = 2  # places in a sentence about who waits for whom


def run(ranks: Ranks) -> bool:
    """True if a rank has not answered its call; one that has may wait for others."""
    return any(_is_in_code(rank) or (is_outside(rank) and not has_returned(rank)) for rank in ranks)


def _is_in_code(rank: Mapping[str, Any]) -> bool:
    return rank.get("marks", [""])[0] in _IN_USER_CODE


def moved(before: Ranks, now: Ranks) -> bool:
    """True if a rank has made progress; unknown marks do not count."""
    known = {rank["rank"]: rank.get("marks", []) for rank in before}
    return any(
        was is not None and is_now is not None and was != is_now
        for rank in now
        for was, is_now in zip(known.get(rank["rank"], []), rank.get("marks", []), strict=False)
    )


def counted(before: Ranks, now: Ranks) -> bool:
    """True if a rank has counted turns, calls of ``stopping`` or operations in the user's code.

    Phases do not count: a slow rank reaches its function, which may show no progress.
    """
    known = [rank for rank in before if _is_in_code(rank)]
    there = [{**rank, "marks": rank["marks"][1:]} for rank in now if _is_in_code(rank)]
    return moved([{**rank, "marks": rank["marks"][1:]} for rank in known], there)


def has_begun(ranks: Ranks) -> bool:
    """True if ranks show progress at all: a function that only waits, or serves, may show none.

    Before and after the function, each step is progress.
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
    """Return for how long ranks are observed before they count as stalled. ``limit``: the seconds of ``stall=``."""
    busy = _who_may_spin(ranks)
    outside = any(_is_outside_of_us(rank) for rank in ranks if rank["rank"] not in busy)
    return max(_PATIENCE, limit / 4) if outside else APART


def _is_outside_of_us(rank: Mapping[str, Any]) -> bool:
    """True if its main thread waits in the kernel for something other than a lock."""
    return bool(rank.get("asleep")) and "futex" not in rank["asleep"]


def stirred(first: Ranks, now: Ranks) -> bool:
    """True if the main thread of a rank that waits for no other rank has begun another wait, as for a packet."""
    known, busy = {rank["rank"]: rank.get("activity", {}) for rank in first}, _who_may_spin(now)
    return any(
        rank["activity"].get("switches", 0) > known[rank["rank"]].get("switches", 0)
        for rank in now
        # One that does not answer is woken by a signal.
        if rank["rank"] in known
        and rank["rank"] not in busy
        and rank.get("entered") is not None
        and rank.get("activity")
    )


def work(first: Ranks, second: Ranks) -> bool:
    """True if a rank works, by two answers ``APART``."""
    known, spin = {rank["rank"]: rank for rank in first}, _who_may_spin(second)
    return moved(first, second) or any(
        _works(known[rank["rank"]], rank, spins=rank["rank"] in spin) for rank in second if rank["rank"] in known
    )


def _who_may_spin(ranks: Ranks) -> set[int]:
    """Return ranks that may use a CPU while they wait, as NCCL does: in an operation, or for one on a device."""
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
        return True  # it was starting
    used = {kind: now["activity"].get(kind, 0) - was["activity"].get(kind, 0) for kind in (*_LEAST_CPU, "bytes")}
    own = () if spins else ("main", "threads")
    return used["bytes"] >= _LEAST_BYTES or any(used[kind] >= _LEAST_CPU[kind] for kind in (*own, "children"))


def stalled(seconds: float, ranks: Ranks) -> str:
    """Return "made no progress for 5 min 0 s: rank 1 has not entered ..."."""
    return f"made no progress for {in_two_units(seconds)}: {sentence(ranks)}"


def places(ranks: Ranks) -> list[str]:
    """Return a line for the ranks at each place; none if the sentence says it all."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(view_of(rank).doing, []).append(rank["rank"])
    lines = [f"{name_some_ranks(those)} {'is' if len(those) == 1 else 'are'} {doing}" for doing, those in found.items()]
    waits = any(view_of(rank).operation for rank in ranks)
    return [] if waits and len(lines) <= _TOLD else lines
