"""The commands about running launches: ``mlaunch ps`` and ``stop``, and what those of features share with them."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch._version import SCHEMA
from mlaunch.base import linux
from mlaunch.base.text import columns, filled, name_some_ranks, shown
from mlaunch.caller.running_launches import ID_SHOWN, ask, facts_of, place_of_rank, title_of
from mlaunch.core import load
from mlaunch.protocol import registry
from mlaunch.protocol.registry import END, STATUS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EVERY = 1.0  # seconds
_MOST_ROWS = 16  # of ranks that ps shows each by itself
_WATCH = "show a table that is updated every second, or every SECONDS, until Ctrl-C"
CALLER = "only launches of process PID, or of a process that it started"

# Fields for programs, with the values of an agent of another version that lacks them.
_OF_LAUNCH: dict[str, Any] = {
    "id": "", "function": "", "age": 0.0, "caller": 0, "agent": 0, "cwd": "", "argv": [], "source": "", "given": "",
    "call": None, "world_size": 0, "restart_count": 0, "features": {},
}  # fmt: skip
_OF_RANK: dict[str, Any] = {"rank": 0, "pid": 0, "device": "-", "state": "", "host": None, "place": None}


# The choice of launches


def add_choice(command: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments that choose launches; without them the command takes ``default``."""
    what = f"the launch: its ID as ps shows it, or the beginning of that (default: {default})"
    command.add_argument("id", nargs="?", type=_id, metavar="ID", help=what)
    command.add_argument("--caller", type=pid, metavar="PID", help=CALLER)
    command.add_argument("--json", action="store_true", help="print JSON for programs; docs/schema.json has the fields")


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
    example = f"mlaunch {command} {running[0]['id'][:ID_SHOWN]}"
    return f"{len(running)} launches are running; say which one, such as {example}:{rows}"


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


# ``ps`` and ``stop``

_STOP = """\
Stop a running launch. If its ranks call mlaunch.stopping(), or it has the option stop_on, they stop by themselves at a
step that they agree on, within stop_grace, and its caller gets their values. Otherwise, or with --now, it ends as
after a failure: ranks get SIGTERM, and SIGKILL after the grace period, and its caller gets a LaunchError that says so.
The command returns when the ranks are gone. If they stay for more calls, it returns when this call is over.
"""


def add_ps(commands: Commands) -> None:
    ps = commands.add_parser(
        "ps", help="list this user's running launches", description="List this user's running launches, newest first."
    )
    form = ps.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print one JSON list, with the command line and directory of each launch"
    )
    ps.add_argument("--caller", type=pid, metavar="PID", help=CALLER)
    form.add_argument("--watch", nargs="?", type=_period, const=_EVERY, metavar="SECONDS", help=_WATCH)
    ps.set_defaults(run=_ps)


def add_stop(commands: Commands) -> None:
    stop = commands.add_parser("stop", help="end a running launch", description=_STOP)
    add_choice(stop, "the only one")
    stop.add_argument("--now", action="store_true", help="end it at once, whatever its ranks are doing")
    stop.set_defaults(run=_stop)


def _period(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed: seconds, more than 0")


def _ps(args: argparse.Namespace) -> int:
    if args.watch is not None:
        shown_by = load.room("insight", "command", "mlaunch ps --watch")
        return int(shown_by.watch(args.watch, args.caller))
    launches = sorted(of_caller(ask(STATUS), args.caller), key=lambda launch: float(launch["age"]))
    if args.json:
        print_json([data_of(launch) for launch in launches])
    else:
        (leases, trouble), (kept, _) = _rows_of("leases"), _rows_of("warm")
        blocks = [*(_entry(launch) for launch in launches), *("\n".join(rows) for rows in (leases, kept) if rows)]
        print("\n\n".join(blocks) or nothing())
        if trouble:
            print(f"mlaunch: {trouble}", file=sys.stderr)
            return 1
    return 0


def _rows_of(feature: str) -> tuple[list[str], str]:
    """Return a feature's lines, and why that cannot be told; "" if it can, or there is no such feature."""
    found = load.at_hand(feature, "command")
    try:
        return ([] if found is None else found.rows(os.environ)), ""
    except OSError as error:
        return [], str(error)


def _stop(args: argparse.Namespace) -> int:
    start = args.id or ""
    found = of_caller(ask(STATUS, start), args.caller)
    ids = {launch["id"] for launch in found}  # the parts of one launch that are on this machine have the same
    if len(ids) != 1:
        raise LookupError(none_of(args.caller) if args.caller and not found else which(start, found, "stop"))
    for launch in () if args.json else found:
        print(f"{'ending' if args.now else 'stopping'} {title_of(launch)}", flush=True)
    word = END if args.now else load.room("agreed_stop", "wire", "mlaunch stop").STOP
    told = ask(word, *ids, patient=True)
    if refused := [answer["refused"] for answer in told if "refused" in answer]:
        raise LookupError(refused[0])
    if args.json:
        print_json([{**data_of(launch), "asked": "end" if args.now else "stop"} for launch in found])
    else:
        print("ended" if args.now else "stopped")
    return 0


def none_of(caller: int | None) -> str:
    """Return the message that this process, or one that it has started, has no launch here; None: nobody has."""
    if caller is None:
        return nothing()
    ids = ", ".join(f"{launch['id'][:ID_SHOWN]} (pid {launch['caller']})" for launch in ask(STATUS))
    return f"process {caller} has no launch running here; " + (f"running: {ids}" if ids else nothing())


def _entry(launch: Mapping[str, Any]) -> str:
    launch = shown(launch)
    rows = [
        ("RANK", "PID", "DEVICE", "STATE"),
        *(_each if len(launch["ranks"]) <= _MOST_ROWS else _alike)(launch["ranks"]),
    ]
    widths = [max(columns(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(map(filled, row, [*widths, 0])) for row in rows]
    lines = [_origin(launch), *facts_of(launch), *lines]
    return "\n".join([title_of(launch), *(f"  {line}".rstrip() for line in lines)])


def _origin(launch: Mapping[str, Any]) -> str:
    """Return the calling program, its directory, and the current call on ranks that stay.

    For example "train.py in /home/me: runs step()".
    """
    runs = f": runs {launch['call']}" if launch.get("call") else ""
    return f"{launch['source'] or 'a process'} in {launch['cwd']}{runs}"


def _each(ranks: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [(str(rank["rank"]), str(rank["pid"]), _where(rank), rank["state"]) for rank in ranks]


def _where(rank: Mapping[str, Any]) -> str:
    """Return a rank's device, and the place to which it is bound: "cuda:5, node 1, CPUs 24-47"."""
    return ", ".join(text for text in (place_of_rank(rank), rank.get("place")) if text)


def _alike(ranks: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return a row for all ranks that do the same on the same kind of device; --json tells of each."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        groups.setdefault((rank["device"].partition(":")[0], rank["state"]), []).append(rank)
    rows = []
    for (kind, state), members in groups.items():
        if len(members) == 1:
            rows += _each(members)
        else:
            numbers = name_some_ranks([rank["rank"] for rank in members]).partition(" ")[2]
            rows.append((numbers, f"{len(members)} pids", kind, state))
    return rows
