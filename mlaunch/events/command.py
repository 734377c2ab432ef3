"""``--events`` of ``mlaunch run``."""

from __future__ import annotations

import argparse
from typing import Any

from mlaunch.cli.checks import UsageError

GROUP = "output"


def add(_flags: Any, group: Any) -> None:
    """Add the flag to a group of the parser's."""
    group.add_argument("--events", metavar="FILE", help="a line of JSON for each event (launch, rank, failure, stall, "
                       "slow, stop, restart, end), added to FILE; otel: spans of OpenTelemetry")  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the option that the flag asks for; UsageError for what it cannot mean."""
    if args.events == "":
        raise UsageError("--events: allowed: the path of a file, or otel")
    return {"events": args.events}
