"""The running launches that a command is about."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch._version import SCHEMA
from mlaunch.base import linux
from mlaunch.caller.running_launches import ID_SHOWN, ask, title_of
from mlaunch.protocol import registry
from mlaunch.protocol.visitors import STATUS

CALLER = "only launches that this process made, or a process that it started"

# Fields for programs, with the values of an agent of another version that lacks them.
_OF_LAUNCH: dict[str, Any] = {
    "id": "", "function": "", "age": 0.0, "caller": 0, "agent": 0, "cwd": "", "argv": [], "source": "", "given": "",
    "call": None, "world_size": 0, "restart_count": 0, "features": {},
}  # fmt: skip
_OF_RANK: dict[str, Any] = {"rank": 0, "pid": 0, "device": "-", "state": "", "host": None, "place": None}


def add_choice(command: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments that choose launches; without them the command takes ``default``."""
    what = f"as ps shows it, or its start (default: {default})"
    command.add_argument("id", nargs="?", type=_id, metavar="ID", help=what)
    command.add_argument("--caller", type=pid, metavar="PID", help=CALLER)
    command.add_argument("--json", action="store_true", help="for programs; docs/schema.json has the fields")


def _id(text: str) -> str:
    if text:
        return text
    raise argparse.ArgumentTypeError("'' is no ID (a shell variable that is not set?); allowed: an ID, or none")


def pid(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed: the number of a process")


def asked(word: bytes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the answers of the chosen launches; LookupError if none has the given ID."""
    launches = [launch for start in _starts(args) for launch in ask(word, start)]
    if refused := [launch["refused"] for launch in launches if "refused" in launch]:
        raise LookupError(refused[0])
    if args.id and not launches:
        others = dict.fromkeys(launch["id"][:ID_SHOWN] for launch in ask(STATUS))  # parts of one have its ID
        running = f"running: {', '.join(others)}" if others else nothing()
        raise LookupError(f"no running launch has an ID that starts with {args.id!r}; {running}")
    return launches


def _starts(args: argparse.Namespace) -> list[str]:
    """Return the starts of the chosen launches' IDs: only these are asked."""
    if args.caller is None:
        return [args.id or ""]
    return list(dict.fromkeys(launch["id"] for launch in of_caller(ask(STATUS, args.id or ""), args.caller)))


def of_caller(launches: list[dict[str, Any]], caller: int | None) -> list[dict[str, Any]]:
    """Return launches that this process, or one that it has started, has called; None: all."""
    return [launch for launch in launches if caller is None or linux.is_below(launch["caller"], caller)]


def which(start: str, found: Sequence[Mapping[str, Any]], command: str) -> str:
    """Return the message that asks for the ID of a running launch."""
    running = found or ask(STATUS)
    if not running:
        return nothing()
    rows = "".join(f"\n  {title_of(launch)}" for launch in running)
    if not found:
        return f"no running launch has an ID that starts with {start!r}; running:{rows}"
    return f"{len(running)} launches run; say which, such as mlaunch {command} {running[0]['id'][:ID_SHOWN]}:{rows}"


def nothing() -> str:
    """Return the message that no launch runs."""
    places = ", ".join(str(path) for path in registry.candidates(os.environ))
    return f"no launch of this user is running here (looked in {places})"


def print_json(found: object) -> None:
    print(json.dumps(found, indent=2))


# For programs, with the fields of docs/schema.json


def data_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch with its ranks. ``told``: the answer of its agent, which may be of another version."""
    return launch_data(told, [rank_data(each) for each in told["ranks"]])


def launch_data(told: Mapping[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a launch, with these ranks."""
    return {"schema": SCHEMA, **{name: told.get(name, usual) for name, usual in _OF_LAUNCH.items()}, "ranks": ranks}


def rank_data(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank."""
    return {name: told.get(name, usual) for name, usual in _OF_RANK.items()}
