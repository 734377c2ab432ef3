"""``mlaunch debug``: a debugger's prompt in running ranks, from another terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.text import name_ranks
from mlaunch.caller.running_launches import ID_SHOWN, ask_by_name, title_of
from mlaunch.cli.launch_commands import which
from mlaunch.protocol.registry import STATUS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_WHAT = """\
Open a prompt of Python's debugger in ranks of a running launch: a call, ranks that stay, or mlaunch run. Each rank
stops at its next line of Python; a rank that waits inside C code stops when that code returns. The commands are
those of debug=True: all n, ranks 1,3 p x, switch 2, who, c, detach, q. Ctrl-C, the end of input (Ctrl-D) and detach
leave the debugger, and the ranks continue; q ends the launch. Without an ID, the only launch is taken, or several are
listed.
"""


def add_command(commands: Commands) -> None:
    debug = commands.add_parser("debug", help="open a debugger's prompt in running ranks", description=_WHAT)
    debug.add_argument(
        "id", nargs="?", default="", metavar="ID", help="as ps shows it, or its start (default: the only one)"
    )
    debug.add_argument(
        "ranks", nargs="?", type=_ranks, metavar="RANK", help="such as 1, or 0,2 (default: all that are here)"
    )
    debug.set_defaults(run=_debug)


def _ranks(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text}: allowed: a rank, or ranks with commas, such as 0,2")
    return sorted({int(word) for word in words})


def _debug(args: argparse.Namespace) -> int:
    found = ask_by_name(STATUS, args.id)
    launches = [launch for _, launch in found]
    if not args.id and len({launch["id"] for launch in launches}) > 1:
        print("\n".join(title_of(launch) for launch in launches))
        print(f"say which one, and a rank if you like: mlaunch debug {launches[0]['id'][:ID_SHOWN]} 0")
        return 0
    if len({launch["id"] for launch in launches}) != 1:
        raise LookupError(
            f"{which(args.id, launches, 'debug')}\nLaunches that have ended, and other users', are not seen here"
        )
    ranks = _chosen(args.ranks, launches)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LookupError("mlaunch debug asks for lines: standard input and output must be a terminal")
    return _visit([name for name, _ in found], launches[0], ranks)


def _chosen(wanted: Sequence[int] | None, launches: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks to stop. LookupError: the launch has no such rank here."""
    here = {rank["rank"]: rank["state"] for launch in launches for rank in launch["ranks"]}
    missing = [rank for rank in wanted or [] if rank not in here]
    if missing:
        name = launches[0]["function"]
        raise LookupError(f"{name_ranks(missing)}: on this machine {name} has {name_ranks(sorted(here))}")
    return sorted(wanted or (rank for rank, state in here.items() if not state.startswith("ended")))


def _visit(names: Sequence[str], launch: Mapping[str, Any], ranks: Sequence[int]) -> int:
    from mlaunch.debug.caller.visiting import AttachedRanks, LaunchParts

    parts = LaunchParts(names)
    visit = AttachedRanks(launch["id"], launch["function"], parts, _write)
    try:
        visit.attach(ranks)
        visit.run()
    except KeyboardInterrupt:
        print("left; the ranks continue")
    finally:
        visit.close()
        parts.close()
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)
