"""The meaning of agents' answers about ranks: who holds up the others, in words, and whether they make progress.

Pure functions on tables. They are for ``mlaunch why``, reports of a deadline, and ``stall=``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlaunch.base.frames import STATES, is_library, main_frames, module_of
from mlaunch.base.text import in_two_units, name_some_ranks, shown
from mlaunch.caller.report.failure_text import in_phase, in_words, operation_of, users_place
from mlaunch.insight.caller.wait_graph import RankView, WaitView, waited_for, why
from mlaunch.protocol.messages import Operations, Phase, RankStacks

_HANDLES = "handling an exception"
_FINALLY = "in a finally block"
_NOBODY = "no rank waits"
_UNKNOWN = "asleep"  # a sleeping thread, if the kernel does not say for what
# Modules in which a thread waits for others of its process.
_FOR_THREADS = {"threading", "queue", "concurrent.futures._base", "selectors", "multiprocessing.pool"}
_LOADERS = ("/torch/utils/data/", "/torch/multiprocessing/")  # they wait for processes of their own
_MOST_TOLD = 4
_RUNNING = "running"
_RETURNED = "(it returned)"
_SILENT = "where its control thread does not answer (C code may hold the interpreter lock)"


def sentence(ranks: Iterable[Mapping[str, Any]]) -> str:
    """Return the sentence about ranks, from an agent's answer to ``why``; if none waits, those outside the function."""
    ranks = [*ranks]
    views = [view_of(rank) for rank in ranks]
    outside = [view for rank, view in zip(ranks, views, strict=True) if _is_outside(rank)]
    if not (said := why(views)).startswith(_NOBODY) or not outside:
        return said
    done = "all ranks have returned, and " if all(view.returned for view in views) else ""
    return done + "; ".join(_by_place(outside)[:_MOST_TOLD])


def _by_place(views: Iterable[RankView]) -> list[str]:
    """Return "ranks 0 and 2 are in wait at train.py:7" for each place."""
    found: dict[str, list[int]] = {}
    for view in views:
        found.setdefault(view.doing, []).append(view.rank)
    return [f"{name_some_ranks(those)} {'is' if len(those) == 1 else 'are'} {doing}" for doing, those in found.items()]


def blamed(ranks: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that hold up the others."""
    return waited_for([view_of(rank) for rank in ranks])


def _has_returned(rank: Mapping[str, Any]) -> bool:
    return _RETURNED in rank["state"]


def _is_outside(rank: Mapping[str, Any]) -> bool:
    """True for a rank on its way to the function, or after it on its way to its end."""
    return not rank["state"].startswith((_RUNNING, "ended", Phase.IDLE.value, Phase.RETURNED.value))


def of_stacks(dumps: Sequence[RankStacks], returned: Iterable[int]) -> tuple[list[str], list[int]]:
    """Return the sentence about ranks that a deadline has ended, and the ranks that hold up the others.

    Both are empty if no rank waits for another, or they were not asked.
    """
    if not any(dump.entered for dump in dumps) or any(dump.entered == Operations() for dump in dumps):
        return [], []
    nothing = dataclasses.asdict(Operations())
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "state": _RETURNED, "frames": [], "entered": nothing} for rank in returned
    ]
    for dump in dumps:
        held = f" ({STATES[dump.state]})" if dump.state in STATES else ""
        entered = None if dump.entered is None else dataclasses.asdict(dump.entered)
        told = {"state": f"{dump.phase.value}{held}", "frames": main_frames(dump.text), "entered": entered}
        ranks.append({"rank": dump.rank, **told})
    views = [view_of(rank) for rank in ranks]
    return ([said], waited_for(views)) if not (said := why(views)).startswith(_NOBODY) else ([], [])


def view_of(rank: Mapping[str, Any]) -> RankView:
    """Return the view of a rank, from its agent's answer."""
    rank = shown(rank)
    frames = [tuple(frame) for frame in rank["frames"]]
    told, children = rank.get("entered"), rank.get("children", [])
    runs, returned, phase = rank["state"].startswith(_RUNNING), _has_returned(rank), rank["state"].partition(" (")[0]
    doing = in_words(frames) if runs else in_phase(phase, frames)
    doing = rank["state"] if doing in {"", phase} else doing
    blocks = [_block_of(file, line) for file, line, _ in frames if not is_library(file)] if runs else []
    doing += next((f", {block}" for block in blocks if block), "")
    if "(it " in rank["state"] and doing != rank["state"]:  # the kernel holds it, or a signal has stopped it
        doing += f" ({rank['state'].partition('(')[2]}"
    elif told is None and frames:
        doing += f", {_SILENT}"
    if children:
        doing += "".join(f"; its child {child}" for child in children[:2])
    view = RankView(rank["rank"], doing, returned=returned, **_begun(told))
    if returned:
        return view
    waits, is_free = _waits(rank, frames, doing)
    return dataclasses.replace(view, operation=operation_of(frames), waits=tuple(waits), is_free=is_free)


def _begun(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the operations that a rank has begun in each group."""
    if told is None:
        return {}
    groups = told["groups"]
    counts = {way: {group["name"]: dict(map(tuple, group[way])) for group in groups} for way in ("sent", "received")}
    return {
        "entered": {group["name"]: (tuple(group["members"]), group["number"]) for group in groups},
        "latest": {group["name"]: group["latest"] for group in groups},
        "completed": {group["name"]: done for group in groups if (done := group.get("completed")) is not None},
        "made": told["made"],
        **counts,
    }


def _waits(
    rank: Mapping[str, Any], frames: Sequence[tuple[str, str, str]], doing: str
) -> tuple[list[WaitView], bool | None]:
    """Return a rank's waits; and True if its main thread is not in one (None: unless it is ahead of others)."""
    told = rank.get("entered") or {"waits": [], "groups": []}
    ours = [_awaited(wait, doing) for wait in told["waits"] if not wait["thread"] and wait["operation"]]
    others = [_awaited(wait, _in_thread(wait)) for wait in told["waits"] if wait["thread"] and wait["operation"]]
    if ours:
        return [*ours, *others], False
    asleep, inner = rank.get("asleep"), frames[: users_place(frames)]
    if others:
        return others, not (frames and module_of(frames[0][0]) in _FOR_THREADS)
    if any("/torch/" in file for file, _, _ in inner):
        spins = any(not group["name"].endswith(" cpu") for group in told["groups"])
        loads = any(part in file for part in _LOADERS for file, _, _ in inner)
        waits = not loads and (asleep != "" or spins)
        return ([WaitView(operation_of(frames), doing)] if waits else []), None
    # A method in C has no frame: Work.wait in another library, Tensor.item.
    may_wait = bool(frames) and not inner and asleep and ("futex" in asleep or asleep == _UNKNOWN)
    return ([WaitView("", doing, is_known=False)] if may_wait else []), None


def _in_thread(wait: Mapping[str, Any]) -> str:
    frames = [tuple(frame) for frame in wait["frames"]]
    doing = f"in {wait['operation']}" if users_place(frames) is None else in_words(frames)
    return f"{doing} in its thread {wait['thread']!r}"


def _awaited(wait: Mapping[str, Any], doing: str) -> WaitView:
    words = {name: wait[name] for name in ("operation", "group", "number", "peer", "tag")}
    return WaitView(doing=doing, members=tuple(wait["members"]), **words)


def _block_of(file: str, line: str) -> str:
    """Return "handling an exception" or "in a finally block"; "" for other lines, or without the source."""
    if not line.isdigit():
        return ""
    return next((words for first, last, words in _blocks(file) if first <= int(line) <= last), "")


@functools.lru_cache(maxsize=64)
def _blocks(file: str) -> list[tuple[int, int, str]]:
    """Return first line, last line and words of such blocks, inner ones first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            parts = [(handler.body, _HANDLES) for handler in node.handlers] + [(node.finalbody, _FINALLY)]
            found += [(body[0].lineno, body[-1].end_lineno or 0, words) for body, words in parts if body]
    return found[::-1]


# Signs of progress, and of work without progress. Progress is a phase, a turn of ``mlaunch.progress``, a call of
# ``mlaunch.stopping`` or an operation of a process group. Ranks that make none for long may compile, evaluate or write
# a checkpoint. So all are asked twice for their places and resources: a rank works if these have changed.

Ranks = Sequence[Mapping[str, Any]]  # each as in its agent's answer
APART = 1.0  # seconds between two answers
# Seconds without a sign of life from a rank that waits for something outside (a service, a disk, a child).
_PATIENCE = 5.0
_IN_USER_CODE = {Phase.RUNNING.value, Phase.COMMANDED.value}
_LEAST_CPU = {"main": 0.05, "threads": 0.2, "children": 0.05}  # seconds, more than answering takes
_LEAST_BYTES = 65536
_TOLD = 2  # places in a sentence about who waits for whom


def run(ranks: Ranks) -> bool:
    """True if a rank has not answered its call; one that has may wait for others."""
    return any(_is_in_code(rank) or (_is_outside(rank) and not _has_returned(rank)) for rank in ranks)


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
        or any(_is_outside(rank) for rank in ranks)
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
    views = [view_of(rank) for rank in ranks]
    lines = _by_place(views)
    return [] if any(view.operation for view in views) and len(lines) <= _TOLD else lines
