"""The rank of a launch that the others wait for, in words: for ``mlaunch why`` and reports of a deadline."""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlaunch.base.frames import STATES, is_library, main_frames, module_of
from mlaunch.base.text import name_some_ranks, shown
from mlaunch.caller.report.failure_text import in_phase, in_words, operation_of, users_place
from mlaunch.insight.caller.wait_graph import RankView, WaitView, waited_for, why
from mlaunch.protocol.messages import Operations, Phase, RankStacks

_HANDLES = "handling an exception"
_FINALLY = "in a finally block"

_NOBODY = "no rank waits"
UNKNOWN = "asleep"  # a sleeping thread, if the kernel does not say for what
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
    outside = [view for rank, view in zip(ranks, views, strict=True) if is_outside(rank)]
    if not (said := why(views)).startswith(_NOBODY) or not outside:
        return said
    found: dict[str, list[int]] = {}
    for view in outside:
        found.setdefault(view.doing, []).append(view.rank)
    told = [f"{name_some_ranks(those)} {'is' if len(those) == 1 else 'are'} {doing}" for doing, those in found.items()]
    done = "all ranks have returned, and " if all(view.returned for view in views) else ""
    return done + "; ".join(told[:_MOST_TOLD])


def blamed(ranks: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that hold up the others."""
    return waited_for([view_of(rank) for rank in ranks])


def has_returned(rank: Mapping[str, Any]) -> bool:
    return _RETURNED in rank["state"]


def is_outside(rank: Mapping[str, Any]) -> bool:
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
    runs, returned, phase = rank["state"].startswith(_RUNNING), has_returned(rank), rank["state"].partition(" (")[0]
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
    may_wait = bool(frames) and not inner and asleep and ("futex" in asleep or asleep == UNKNOWN)
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
