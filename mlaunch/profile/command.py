"""``--profile``, ``--profile-steps`` and ``--profile-ranks`` of ``mlaunch run``."""

from __future__ import annotations

import argparse
from typing import Any

from mlaunch.caller.options.option_values import FromTo, SomeRanks
from mlaunch.cli.checks import UsageError, numbers

GROUP = "output"


def add(_flags: Any, group: Any) -> None:
    """Add the flags to a group of the parser's."""
    group.add_argument("--profile", metavar="FILE", help="a trace of torch.profiler, with a track for each rank, for "
                       "ui.perfetto.dev; compressed if it ends with .gz")  # fmt: skip
    group.add_argument("--profile-steps", metavar="I,J", default="5,8", help="the first step and the one after the "
                       "last: turns of mlaunch.progress, or calls of mlaunch.step() (default: 5,8)")  # fmt: skip
    group.add_argument("--profile-ranks", metavar="I,J", help="of which ranks (default: all)")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the flags ask for; UsageError for what they cannot mean."""
    if args.profile is not None and args.no_python:
        raise UsageError("--profile with --no-python: allowed: one of the two, since torch.profiler is of Python's")
    steps = _checked("--profile-steps", args.profile_steps, FromTo())
    ranks = None
    if args.profile_ranks is not None:
        ranks = _checked("--profile-ranks", args.profile_ranks, SomeRanks())
    if args.profile == "":
        raise UsageError("--profile: allowed: the path of a file")
    return {"profile": args.profile, "profile_steps": steps, "profile_ranks": ranks}


def _checked(name: str, text: str, allowed: FromTo | SomeRanks) -> tuple[int, ...]:
    found = numbers(name, text)
    try:
        allowed.check(name, found)
    except ValueError:
        raise UsageError(f"{name} {text}: allowed: {allowed.of_flag}") from None
    return found
