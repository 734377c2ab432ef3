"""Running launches as programs read them (``mlaunch ps --json``), with the fields of ``docs/schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlaunch._version import SCHEMA

_OF_LAUNCH: dict[str, Any] = {
    "id": "", "function": "", "age": 0.0, "caller": 0, "agent": 0, "cwd": "", "argv": [], "source": "", "given": "",
    "call": None, "world_size": 0, "restart_count": 0, "features": {},
}  # fmt: skip
_OF_RANK: dict[str, Any] = {"rank": 0, "pid": 0, "device": "-", "state": "", "host": None, "place": None}


def running(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch with what each rank does. ``told``: by its agent, which may be of another version."""
    return launch(told, [rank(each) for each in told["ranks"]])


def launch(told: Mapping[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what programs read of a launch, with these ranks."""
    return {"schema": SCHEMA, **{name: told.get(name, usual) for name, usual in _OF_LAUNCH.items()}, "ranks": ranks}


def rank(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what they read of a rank."""
    return {name: told.get(name, usual) for name, usual in _OF_RANK.items()}
