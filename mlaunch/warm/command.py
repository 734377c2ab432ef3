"""``mlaunch warm``: keep a fork server that has imported torch, for commands and scripts to use forks of."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaunch._version import SCHEMA
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.text import in_bytes, in_two_units, shown
from mlaunch.warm.caller import duration, zygotes
from mlaunch.warm.wire import import_facts
from mlaunch.warm.wire.zygote_messages import ZygoteState

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_INTERRUPTED = 130  # the exit status for Ctrl-C
_USUAL_TIME = "30m"
_ABOUT = """\
Keep a fork server, which has imported torch, for this user on this machine. mlaunch run, scripts with decorated
functions and tests on ranks then use a fork of it and start at once, if everything that matters to an import is equal.
It ends some time after its last use.
"""


def add_command(commands: Commands) -> None:
    warm = commands.add_parser("warm", help="keep a fork server, so that commands start at once", description=_ABOUT)
    warm.add_argument("--for", dest="seconds", metavar="TIME", help="how long it stays after its last use: 90s, 30m, "
                      f"8h, 2d (default: {_USUAL_TIME})")  # fmt: skip
    warm.add_argument("--preload", metavar="MODULES", help="import these modules, too: names with commas between them")
    instead = warm.add_mutually_exclusive_group()
    instead.add_argument(
        "--status",
        action="store_true",
        help="show the warm fork servers, and whether a command here would use them",
    )
    instead.add_argument("--stop", action="store_true", help="end all warm fork servers; running commands continue")
    warm.add_argument("--json", action="store_true", help="with --status, for programs: one JSON list")
    warm.set_defaults(run=_warm, refuse=warm.error)


def _warm(args: argparse.Namespace) -> int:
    _check(args)
    if args.status:
        return _status(as_json=args.json)
    if args.stop:
        return _stop()
    try:
        seconds = duration("--for", args.seconds or _USUAL_TIME)
    except ValueError as error:
        args.refuse(str(error))
    wanted = tuple(dict.fromkeys(name for name in (args.preload or "").split(",") if name))
    if args.preload is not None and not all(_is_name(name) for name in wanted or ("",)):
        args.refuse(f"--preload {args.preload}: allowed: names of modules with commas between them")
    try:
        state = zygotes.begin(os.environ, seconds, wanted)
    except KeyboardInterrupt:
        print("mlaunch: interrupted: no warm fork server was started", file=sys.stderr)
        return _INTERRUPTED
    except BlockingIOError:
        raise OSError("another mlaunch warm has been starting for a minute; look for one that is stopped") from None
    except LaunchError as error:
        raise OSError(str(error)) from None
    if lacking := [name for name in wanted if name not in state.preload]:
        raise OSError(
            f"a warm fork server (pid {state.pid}) runs here already, and has not imported {', '.join(lacking)}; end "
            f"it with mlaunch warm --stop, then start one that imports all of them"
        )
    kept = (
        f"a warm fork server (pid {state.pid}) has imported {_imports(state)}, and stays until "
        f"{in_two_units(state.idle)} after its last use; mlaunch warm --stop ends it"
    )
    print("\n  ".join([kept, *state.notes]))
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.status or args.stop) and (args.seconds or args.preload):
        args.refuse("--for and --preload go with neither --status nor --stop")
    if args.json and not args.status:
        args.refuse("--json goes with --status")


def _is_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _stop() -> int:
    pids = zygotes.end_all(os.environ)
    print(f"ended: pid {', '.join(map(str, pids))}" if pids else "no warm fork server runs here")
    return 0


def _status(*, as_json: bool) -> int:
    found = zygotes.states(os.environ, facts=True)
    here = zygotes.facts_of(os.environ)
    if as_json:
        print(json.dumps([_as_data(here, state) for state in found], indent=2))
        return 0
    blocks = [
        [_row(state), *(_why_not(here, state) or ["serves all processes that start here"]), *state.notes]
        for state in found
    ]
    print("\n\n".join("\n  ".join(lines) for lines in blocks) or "no warm fork server runs here")
    return 0


def _as_data(here: import_facts.Facts, state: ZygoteState) -> dict[str, Any]:
    names = ("pid", "preload", "idle", "left", "serving", "served", "age", "notes")
    known = {name: getattr(state, name) for name in names}
    return {"schema": SCHEMA, **known, "memory": _memory(state.pid), "why_not": _why_not(here, state)}


def rows(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each warm fork server."""
    return [_row(state) for state in zygotes.states(environ)]


def _row(state: ZygoteState) -> str:
    """Return a line about a warm fork server."""
    memory = _memory(state.pid)
    left = f"serves {state.serving} now" if state.serving else f"ends in {in_two_units(state.left)}"
    return (
        f"a warm fork server (pid {state.pid}) with {_imports(state)}, {in_two_units(state.age)} old: {left}, "
        f"has served {state.served}{f', {in_bytes(memory)} of memory' if memory else ''}"
    )


def _why_not(here: import_facts.Facts, state: ZygoteState) -> list[str]:
    """Return lines that say why it serves no process that starts here; none if it does."""
    if watching := zygotes.onlooker():
        return [f"serves no process that starts here: {watching} would not see its forks"]
    if found := import_facts.differences(here, state.facts):
        return ["serves no process that starts here, since these differ:", *found]
    return [f"serves no process that starts here: {state.refusal}"] if state.refusal else []


def _imports(state: ZygoteState) -> str:
    return ", ".join(["torch", *shown([*state.preload])])


def _memory(pid: int) -> int:
    """Return its memory in bytes, with its part of what it shares with others; 0: unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
