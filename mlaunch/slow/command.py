"""``--slow`` of ``mlaunch run``."""

from __future__ import annotations

import argparse
from typing import Any

from mlaunch.caller.options.launch_options import about
from mlaunch.cli.checks import UsageError

GROUP = "failure and end"


def add(_flags: object, group: Any) -> None:
    """Add the flag to a group of the parser's."""
    group.add_argument("--slow", metavar="SHARE", help="say it once when the others wait for the same rank for more "
                       "than this share of their time, such as 10%%, for 30 s (default: never)")  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the option that the flag asks for; UsageError for what it cannot mean."""
    if args.slow is None:
        return {"slow": None}
    if args.no_python:
        raise UsageError("--slow with --no-python: allowed: one of the two, since collectives are timed in Python")
    try:
        about("slow").allowed.check("slow", args.slow)
    except ValueError:
        raise UsageError(f"--slow {args.slow}: allowed: a share such as 10%, more than 0% and less than 100%") from None
    return {"slow": args.slow}
