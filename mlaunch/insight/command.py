"""``mlaunch stacks`` and ``why``, and the table of ``mlaunch ps --watch``."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch.base.exceptions import frames_by_name
from mlaunch.base.text import shown
from mlaunch.caller.running_launches import facts_of, title_of, whole
from mlaunch.cli.launch_commands import (
    add_choice,
    asked,
    launch_data,
    none_of,
    nothing,
    of_caller,
    print_json,
    rank_data,
)
from mlaunch.insight.wire import ALL_STACKS, STACKS, WHY

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_ALL_THREADS = "every thread of every rank, not grouped; a rank may crash if its other threads run Python meanwhile"
_WHY = """\
Say in one sentence which rank the others wait for, and what it does instead, then where each rank is. The ranks
continue meanwhile.
"""


def add_command(commands: Commands) -> None:
    stacks = commands.add_parser(
        "stacks",
        help="show where the ranks of a running launch are",
        description="Show the Python stacks of a running launch, identical ones only once. The ranks keep running.",
    )
    add_choice(stacks, "all")
    stacks.add_argument("--all-threads", action="store_true", help=_ALL_THREADS)
    stacks.set_defaults(run=_stacks)
    why = commands.add_parser("why", help="say which rank of a running launch the others wait for", description=_WHY)
    add_choice(why, "all")
    why.set_defaults(run=_why)


def watch(every: float, caller: int | None) -> int:
    """Show what ranks do until interrupted. ``caller``: only launches of this process; None: all."""
    from mlaunch.insight.caller.watching import watch_all

    try:
        watch_all(every, functools.partial(none_of, caller), lambda launches: of_caller(launches, caller))
    except ImportError as error:
        print(f"mlaunch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # the way to end it
    return 0


def _why(args: argparse.Namespace) -> int:
    from mlaunch.insight.caller import grouped
    from mlaunch.insight.caller.answers import sentence

    launches = whole(asked(WHY, args))
    if args.json:
        print_json([with_reason(launch) for launch in launches])
        return 0
    blocks = []
    for launch in launches:
        said = [f"  {line}" for line in (sentence(launch["ranks"]), *facts_of(launch))]
        blocks.append("\n".join([title_of(launch), *said, grouped(launch["ranks"])]))
    print("\n\n".join(blocks) or nothing())
    return 0


def _stacks(args: argparse.Namespace) -> int:
    from mlaunch.insight.caller import grouped

    launches = asked(ALL_STACKS if args.all_threads else STACKS, args)
    if args.json:
        print_json([with_stacks(launch, all_threads=args.all_threads) for launch in launches])
        return 0
    show = _every_thread if args.all_threads else grouped
    print("\n\n".join(f"{title_of(launch)}\n{show(launch['ranks'])}" for launch in launches) or nothing())
    return 0


def _every_thread(ranks: Iterable[Mapping[str, Any]]) -> str:
    blocks = []
    for rank in ranks:
        rows = [f"    {shown(row)}" for row in rank["stacks"].splitlines() if row]
        blocks.append("\n".join([f"  rank {rank['rank']} (pid {rank['pid']}): {shown(rank['state'])}", *rows]))
    return "\n".join(blocks)


# For programs, with the fields of docs/schema.json


def with_stacks(told: Mapping[str, Any], *, all_threads: bool) -> dict[str, Any]:
    """Return a launch with each rank's frames; all threads, as the text of faulthandler."""
    return launch_data(told, [_with_frames(rank, all_threads=all_threads) for rank in told["ranks"]])


def with_reason(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch with the sentence of ``mlaunch why``, and the ranks that others wait for."""
    from mlaunch.insight.caller.answers import blamed, sentence, view_of

    ranks = [{**_with_frames(rank), "doing": view_of(rank).doing} for rank in told["ranks"]]
    return {**launch_data(told, ranks), "why": sentence(told["ranks"]), "waited_for": blamed(told["ranks"])}


def _with_frames(told: Mapping[str, Any], *, all_threads: bool = False) -> dict[str, Any]:
    text = {"stacks": told.get("stacks", "")} if all_threads else {}
    return {**rank_data(told), "frames": frames_by_name(told.get("frames", [])), **text}
