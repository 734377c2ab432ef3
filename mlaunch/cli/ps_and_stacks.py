"""``mlaunch ps``, ``stacks`` and ``stop``: what this user's running launches are doing, and how to end one."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.text import columns, filled, name_some_ranks, shown
from mlaunch.caller.report import as_data
from mlaunch.caller.report.stacks_of_ranks import grouped
from mlaunch.caller.running_launches import ask, whole
from mlaunch.caller.watch_rows import ID_SHOWN, place_of_rank, title_of
from mlaunch.caller.watching import EVERY, watch_all
from mlaunch.caller.why_text import sentence
from mlaunch.core import load
from mlaunch.protocol import registry
from mlaunch.protocol.visitors import ALL_STACKS, END, STACKS, STATUS, WHY

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_MOST_ROWS = 16  # of ranks that ps shows each by itself
_WATCH = "a table on the terminal that is updated every second, or every SECONDS; Ctrl-C ends it"
_CALLER = "only launches that this process has called, or one that it has started"
_ALL_THREADS = "every thread of every rank, not grouped; a rank whose other threads run Python meanwhile may die of it"
_WHY = """\
Say in one sentence which rank the others wait for, and what it does instead, then where each rank is. The ranks
continue meanwhile.
"""
_STOP = """\
Stop a running launch. If its ranks call mlaunch.stopping(), or it has the option stop_on, they stop by themselves at a
step that they agree on, within stop_grace, and its caller gets their values. Otherwise, and with --now, it ends as
after a failure: ranks get SIGTERM, and SIGKILL after the grace period, and its caller gets a LaunchError that says so.
The command returns when the ranks are gone, or, for ranks that stay, when their call is over.
"""


def add_commands(commands: Commands) -> None:
    ps = commands.add_parser(
        "ps", help="list this user's running launches", description="List this user's running launches, newest first."
    )
    ps.add_argument("--json", action="store_true", help="one JSON list, with the command line and directory of each")
    ps.add_argument("--caller", type=_pid, metavar="PID", help=_CALLER)
    ps.add_argument("--watch", nargs="?", type=_period, const=EVERY, metavar="SECONDS", help=_WATCH)
    ps.set_defaults(run=_ps)
    stacks = commands.add_parser(
        "stacks",
        help="show where the ranks of a running launch are",
        description="Show the Python stacks of a running launch, equal ones once. The ranks continue meanwhile.",
    )
    _add_choice(stacks, "all")
    stacks.add_argument("--all-threads", action="store_true", help=_ALL_THREADS)
    stacks.set_defaults(run=_stacks)
    why = commands.add_parser("why", help="say which rank of a running launch the others wait for", description=_WHY)
    _add_choice(why, "all")
    why.set_defaults(run=_why)
    stop = commands.add_parser("stop", help="end a running launch", description=_STOP)
    _add_choice(stop, "the one")
    stop.add_argument("--now", action="store_true", help="end it at once, whatever its ranks do")
    stop.set_defaults(run=_stop)


def _add_choice(command: argparse.ArgumentParser, default: str) -> None:
    """Add what chooses launches; without it the command takes ``default``."""
    what = f"as ps shows it, or its start (default: {default})"
    command.add_argument("id", nargs="?", type=_id, metavar="ID", help=what)
    command.add_argument("--caller", type=_pid, metavar="PID", help=_CALLER)
    command.add_argument("--json", action="store_true", help="for programs; docs/schema.json has the fields")


def _id(text: str) -> str:
    if text:
        return text
    raise argparse.ArgumentTypeError("'' is no ID (a shell variable that is not set?); allowed: an ID, or none")


def _pid(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed: the number of a process")


def _period(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed: seconds, more than 0")


def _ps(args: argparse.Namespace) -> int:
    if args.watch is not None:
        return _watch(args.watch)
    launches = sorted(_of_caller(ask(STATUS), args.caller), key=lambda launch: float(launch["age"]))
    if args.json:
        _print_json([as_data.running(launch) for launch in launches])
    else:
        (leases, trouble), (kept, _) = _rows_of("leases"), _rows_of("warm")
        blocks = [*(_entry(launch) for launch in launches), *("\n".join(rows) for rows in (leases, kept) if rows)]
        print("\n\n".join(blocks) or _nothing())
        if trouble:
            print(f"mlaunch: {trouble}", file=sys.stderr)
            return 1
    return 0


def _rows_of(feature: str) -> tuple[list[str], str]:
    """Returns a feature's lines, and why that cannot be told; "" if it can, or there is no such feature."""
    found = load.at_hand(feature, "command")
    try:
        return ([] if found is None else found.rows(os.environ)), ""
    except OSError as error:
        return [], str(error)


def _watch(every: float) -> int:
    try:
        watch_all(every, _nothing)
    except ImportError as error:
        print(f"mlaunch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # which is how it ends
    return 0


def _why(args: argparse.Namespace) -> int:
    launches = whole(_asked(WHY, args))
    if args.json:
        _print_json([as_data.with_reason(launch) for launch in launches])
        return 0
    told = [f"{title_of(launch)}\n  {sentence(launch['ranks'])}\n{grouped(launch['ranks'])}" for launch in launches]
    print("\n\n".join(told) or _nothing())
    return 0


def _asked(word: bytes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what the chosen launches answer; LookupError if none has the ID that was given."""
    launches = [launch for start in _starts(args) for launch in ask(word, start)]
    if args.id and not launches:
        others = dict.fromkeys(launch["id"][:ID_SHOWN] for launch in ask(STATUS))  # parts of one have its ID
        running = f"running: {', '.join(others)}" if others else _nothing()
        raise LookupError(f"no running launch has an ID that starts with {args.id!r}; {running}")
    return launches


def _starts(args: argparse.Namespace) -> list[str]:
    """Return the starts of the chosen launches' IDs: only these are asked for more."""
    if args.caller is None:
        return [args.id or ""]
    return list(dict.fromkeys(launch["id"] for launch in _of_caller(ask(STATUS, args.id or ""), args.caller)))


def _of_caller(launches: list[dict[str, Any]], caller: int | None) -> list[dict[str, Any]]:
    """Return those that this process, or one that it has started, has called; None: all."""
    return [launch for launch in launches if caller is None or linux.is_below(launch["caller"], caller)]


def _print_json(found: object) -> None:
    print(json.dumps(found, indent=2))


def _stacks(args: argparse.Namespace) -> int:
    launches = _asked(ALL_STACKS if args.all_threads else STACKS, args)
    if args.json:
        _print_json([as_data.with_stacks(launch, all_threads=args.all_threads) for launch in launches])
        return 0
    show = _every_thread if args.all_threads else grouped
    print("\n\n".join(f"{title_of(launch)}\n{show(launch['ranks'])}" for launch in launches) or _nothing())
    return 0


def _stop(args: argparse.Namespace) -> int:
    start = args.id or ""
    found = _of_caller(ask(STATUS, start), args.caller)
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
        _print_json([{**as_data.running(launch), "asked": "end" if args.now else "stop"} for launch in found])
    else:
        print("ended" if args.now else "stopped")
    return 0


def _none_of(caller: int) -> str:
    ids = ", ".join(f"{launch['id'][:ID_SHOWN]} (pid {launch['caller']})" for launch in ask(STATUS))
    return f"no launch runs here that process {caller} has called; " + (f"running: {ids}" if ids else _nothing())


def which(start: str, found: Sequence[Mapping[str, Any]], command: str) -> str:
    """Says that one of those that run has to be named to this command."""
    running = found or ask(STATUS)
    if not running:
        return _nothing()
    rows = "".join(f"\n  {title_of(launch)}" for launch in running)
    if not found:
        return f"no running launch has an ID that starts with {start!r}; running:{rows}"
    return f"{len(running)} launches run; say which, such as mlaunch {command} {running[0]['id'][:ID_SHOWN]}:{rows}"


def _nothing() -> str:
    places = ", ".join(str(path) for path in registry.candidates(os.environ))
    return f"no launch of this user is running here (looked in {places})"


def _entry(launch: Mapping[str, Any]) -> str:
    launch = shown(launch)
    rows = [
        ("RANK", "PID", "DEVICE", "STATE"),
        *(_each if len(launch["ranks"]) <= _MOST_ROWS else _alike)(launch["ranks"]),
    ]
    widths = [max(columns(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(map(filled, row, [*widths, 0])) for row in rows]
    return "\n".join([title_of(launch), *(f"  {line}".rstrip() for line in [_origin(launch), *_facts(launch), *lines])])


def _origin(launch: Mapping[str, Any]) -> str:
    """Says what has called, where, and what runs now on ranks that stay: "train.py in /home/me: runs step()"."""
    runs = f": runs {launch['call']}" if launch.get("call") else ""
    return f"{launch['source'] or 'a process'} in {launch['cwd']}{runs}"


def _facts(launch: Mapping[str, Any]) -> list[str]:
    """Return a line for each feature that has something to say of the launch: "counting: calls 3"."""
    return [
        f"{feature}: {', '.join(f'{name} {value}' for name, value in facts.items())}"
        for feature, facts in launch.get("features", {}).items()
    ]


def _each(ranks: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [(str(rank["rank"]), str(rank["pid"]), _where(rank), rank["state"]) for rank in ranks]


def _where(rank: Mapping[str, Any]) -> str:
    """Says on which device it is, and where it was bound: "cuda:5, node 1, CPUs 24-47"."""
    return ", ".join(text for text in (place_of_rank(rank), rank.get("place")) if text)


def _alike(ranks: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Returns a row for all ranks that do the same on the same kind of device; --json tells of each."""
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


def _every_thread(ranks: Iterable[Mapping[str, Any]]) -> str:
    blocks = []
    for rank in ranks:
        rows = [f"    {shown(row)}" for row in rank["stacks"].splitlines() if row]
        blocks.append("\n".join([f"  rank {rank['rank']} (pid {rank['pid']}): {shown(rank['state'])}", *rows]))
    return "\n".join(blocks)
