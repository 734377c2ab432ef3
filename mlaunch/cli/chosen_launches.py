"""Which of this user's running launches a command is about."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.base import linux
from mlaunch.caller.running_launches import ID_SHOWN, ask, title_of
from mlaunch.protocol import registry
from mlaunch.protocol.visitors import STATUS

CALLER = "only launches that this process made, or a process that it started"


def add_choice(command: argparse.ArgumentParser, default: str) -> None:
    """Add what chooses launches; without it the command takes ``default``."""
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
    """Return what the chosen launches answer; LookupError if none has the ID that was given."""
    launches = [launch for start in _starts(args) for launch in ask(word, start)]
    if refused := [launch["refused"] for launch in launches if "refused" in launch]:
        raise LookupError(refused[0])
    if args.id and not launches:
        others = dict.fromkeys(launch["id"][:ID_SHOWN] for launch in ask(STATUS))  # parts of one have its ID
        running = f"running: {', '.join(others)}" if others else nothing()
        raise LookupError(f"no running launch has an ID that starts with {args.id!r}; {running}")
    return launches


def _starts(args: argparse.Namespace) -> list[str]:
    """Return the starts of the chosen launches' IDs: only these are asked for more."""
    if args.caller is None:
        return [args.id or ""]
    return list(dict.fromkeys(launch["id"] for launch in of_caller(ask(STATUS, args.id or ""), args.caller)))


def of_caller(launches: list[dict[str, Any]], caller: int | None) -> list[dict[str, Any]]:
    """Return those that this process, or one that it has started, has called; None: all."""
    return [launch for launch in launches if caller is None or linux.is_below(launch["caller"], caller)]


def which(start: str, found: Sequence[Mapping[str, Any]], command: str) -> str:
    """Says that one of those that run has to be named to this command."""
    running = found or ask(STATUS)
    if not running:
        return nothing()
    rows = "".join(f"\n  {title_of(launch)}" for launch in running)
    if not found:
        return f"no running launch has an ID that starts with {start!r}; running:{rows}"
    return f"{len(running)} launches run; say which, such as mlaunch {command} {running[0]['id'][:ID_SHOWN]}:{rows}"


def nothing() -> str:
    """Says that no launch runs."""
    places = ", ".join(str(path) for path in registry.candidates(os.environ))
    return f"no launch of this user is running here (looked in {places})"


def print_json(found: object) -> None:
    print(json.dumps(found, indent=2))
