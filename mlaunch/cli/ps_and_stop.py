"""``mlaunch ps`` and ``stop``: this user's running launches, and how to end one."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch.base.text import columns, filled, name_some_ranks, shown
from mlaunch.caller.running_launches import ID_SHOWN, ask, facts_of, place_of_rank, title_of
from mlaunch.cli.chosen_launches import CALLER, add_choice, data_of, nothing, of_caller, pid, print_json, which
from mlaunch.core import load
from mlaunch.protocol.visitors import END, STATUS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EVERY = 1.0  # seconds
_MOST_ROWS = 16  # of ranks that ps shows each by itself
_WATCH = "a table on the terminal that is updated every second, or every SECONDS; Ctrl-C ends it"
_STOP = """\
Stop a running launch. If its ranks call mlaunch.stopping(), or it has the option stop_on, they stop by themselves at a
step that they agree on, within stop_grace, and its caller gets their values. Otherwise, and with --now, it ends as
after a failure: ranks get SIGTERM, and SIGKILL after the grace period, and its caller gets a LaunchError that says so.
The command returns when the ranks are gone, or, for ranks that stay, when their call is over.
"""


def add_ps(commands: Commands) -> None:
    ps = commands.add_parser(
        "ps", help="list this user's running launches", description="List this user's running launches, newest first."
    )
    ps.add_argument("--json", action="store_true", help="one JSON list, with the command line and directory of each")
    ps.add_argument("--caller", type=pid, metavar="PID", help=CALLER)
    ps.add_argument("--watch", nargs="?", type=_period, const=_EVERY, metavar="SECONDS", help=_WATCH)
    ps.set_defaults(run=_ps)


def add_stop(commands: Commands) -> None:
    stop = commands.add_parser("stop", help="end a running launch", description=_STOP)
    add_choice(stop, "the one")
    stop.add_argument("--now", action="store_true", help="end it at once, whatever its ranks do")
    stop.set_defaults(run=_stop)


def _period(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed: seconds, more than 0")


def _ps(args: argparse.Namespace) -> int:
    if args.watch is not None:
        shown_by = load.room("insight", "command", "mlaunch ps --watch")
        return int(shown_by.watch(args.watch))
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
        raise LookupError(_none_of(args.caller) if args.caller and not found else which(start, found, "stop"))
    for launch in () if args.json else found:
        print(f"{'ending' if args.now else 'stopping'} {title_of(launch)}", flush=True)
    word = END if args.now else load.room("agreed_stop", "command", "mlaunch stop").STOP
    told = ask(word, *ids, patient=True)
    if refused := [answer["refused"] for answer in told if "refused" in answer]:
        raise LookupError(refused[0])
    if args.json:
        print_json([{**data_of(launch), "asked": "end" if args.now else "stop"} for launch in found])
    else:
        print("ended" if args.now else "stopped")
    return 0


def _none_of(caller: int) -> str:
    ids = ", ".join(f"{launch['id'][:ID_SHOWN]} (pid {launch['caller']})" for launch in ask(STATUS))
    return f"no launch runs here that process {caller} has called; " + (f"running: {ids}" if ids else nothing())


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
