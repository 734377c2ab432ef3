"""``--profile``, ``--profile-steps`` and ``--profile-ranks`` of ``mlaunch run``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypedDict

from mlaunch.caller.options import profile_options
from mlaunch.cli.checks import UsageError, numbers
from mlaunch.protocol.spec import ProfileOrder

if TYPE_CHECKING:
    from mlaunch.caller.launch.call_trace import CallTrace
    from mlaunch.caller.options.launch_options import Options


class ProfileOptions(TypedDict):
    """As the options of a launch."""

    profile: str | None
    profile_steps: tuple[int, ...]
    profile_ranks: tuple[int, ...] | None


def add(group: Any) -> None:
    """Adds the flags to a group of the parser's."""
    group.add_argument("--profile", metavar="FILE", help="a trace of torch.profiler, with a track for each rank, for "
                       "ui.perfetto.dev; compressed if it ends with .gz")  # fmt: skip
    group.add_argument("--profile-steps", metavar="I,J", default="5,8", help="the first step and the one after the "
                       "last: turns of mlaunch.progress, or calls of mlaunch.step() (default: 5,8)")  # fmt: skip
    group.add_argument("--profile-ranks", metavar="I,J", help="of which ranks (default: all)")


def options_of(args: argparse.Namespace) -> ProfileOptions:
    """Reads the flags; UsageError for what they cannot mean."""
    if args.profile is not None and args.no_python:
        raise UsageError("--profile with --no-python: allowed: one of the two, since torch.profiler is of Python's")
    steps = _checked("--profile-steps", args.profile_steps, profile_options.FromTo())
    ranks = None
    if args.profile_ranks is not None:
        ranks = _checked("--profile-ranks", args.profile_ranks, profile_options.SomeRanks())
    if args.profile == "":
        raise UsageError("--profile: allowed: the path of a file")
    return {"profile": args.profile, "profile_steps": steps, "profile_ranks": ranks}


def trace_of(options: Options) -> CallTrace:
    """Returns the trace of a run. UsageError where it cannot be written."""
    from mlaunch.caller.launch.call_trace import CallTrace

    try:
        return CallTrace(options, "--profile {}")
    except OSError as error:
        raise UsageError(error.strerror) from None


def check_ranks(order: ProfileOrder, world_size: int) -> None:
    """Raises UsageError for ranks that there will not be."""
    if order.ranks is not None and max(order.ranks) >= world_size:
        given = ",".join(map(str, order.ranks))
        raise UsageError(f"--profile-ranks {given}: allowed: 0 to {world_size - 1}")


def _checked(name: str, text: str, allowed: profile_options.FromTo | profile_options.SomeRanks) -> tuple[int, ...]:
    found = numbers(name, text)
    try:
        allowed.check(name, found)
    except ValueError:
        raise UsageError(f"{name} {text}: allowed: {allowed.of_flag}") from None
    return found
