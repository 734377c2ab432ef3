"""``--stop-on`` and ``--stop-grace`` of ``mlaunch run``, and the word of ``mlaunch stop``."""

from __future__ import annotations

import argparse
from typing import Any

from mlaunch.agreed_stop.wire import NAME
from mlaunch.base import signals
from mlaunch.cli.checks import UsageError, seconds_of
from mlaunch.protocol.visitors import ASK

GROUP = "failure and end"
STOP = ASK + NAME.encode()  # what ``mlaunch stop`` says to a launch


def add(_flags: object, group: Any) -> None:
    """Add the flags to a group of the parser's."""
    group.add_argument("--stop-on", metavar="NAMES", help="signals that ask the ranks to stop at a step that they "
                       "agree on, where mlaunch.stopping() is true (default: none)")  # fmt: skip
    group.add_argument("--stop-grace", type=float, default=300.0, metavar="SECONDS",
                       help="for ranks that are asked to stop (default: 300)")  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the flags ask for; UsageError for what they cannot mean."""
    grace = seconds_of("--stop-grace", args.stop_grace)
    return {"stop_on": _signals_of(args.stop_on), "stop_grace": grace}


def _signals_of(text: str | None) -> str | None:
    if text is not None:
        try:
            signals.numbers_of(f"--stop-on {text}", text)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return text
