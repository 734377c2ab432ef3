"""``--stop-on`` and ``--stop-grace`` of ``mlaunch run``."""

from __future__ import annotations

import argparse
from typing import Any

from mlaunch.base import signals
from mlaunch.cli.checks import UsageError, seconds_of

GROUP = "failure and end"


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
