"""Running launches as programs read them (``mlaunch ps --json``), with the fields of ``docs/schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlaunch.base.failure_data import named
from mlaunch.base.schema import VERSION
from mlaunch.caller.why_text import blamed, sentence, view_of

_OF_LAUNCH: dict[str, Any] = {
    "id": "", "function": "", "age": 0.0, "caller": 0, "agent": 0, "cwd": "", "argv": [], "source": "", "given": "",
    "call": None, "world_size": 0, "restart_count": 0, "features": {},
}  # fmt: skip
_OF_RANK: dict[str, Any] = {"rank": 0, "pid": 0, "device": "-", "state": "", "host": None, "place": None}


def running(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch with what each rank does. ``told``: by its agent, which may be of another version."""
    return _launch(told, [_rank(rank) for rank in told["ranks"]])


def with_stacks(told: Mapping[str, Any], *, all_threads: bool) -> dict[str, Any]:
    """Return the same with where each rank is; with all threads as the text that faulthandler wrote."""
    return _launch(told, [_with_frames(rank, all_threads=all_threads) for rank in told["ranks"]])


def with_reason(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with the sentence of ``mlaunch why``, and the ranks that the others wait for."""
    ranks = [{**_with_frames(rank), "doing": view_of(rank).doing} for rank in told["ranks"]]
    return {**_launch(told, ranks), "why": sentence(told["ranks"]), "waited_for": blamed(told["ranks"])}


def _launch(told: Mapping[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": VERSION, **{name: told.get(name, usual) for name, usual in _OF_LAUNCH.items()}, "ranks": ranks}


def _rank(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told.get(name, usual) for name, usual in _OF_RANK.items()}


def _with_frames(told: Mapping[str, Any], *, all_threads: bool = False) -> dict[str, Any]:
    text = {"stacks": told.get("stacks", "")} if all_threads else {}
    return {**_rank(told), "frames": named(told.get("frames", [])), **text}
