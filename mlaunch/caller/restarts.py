"""Starting all ranks again after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mlaunch.base.errors import LaunchTimeout, report_of

T = TypeVar("T")


def with_restarts(
    attempt: Callable[[float | None, int], T],
    name: str,
    deadline: float | None,
    max_restarts: int,
    tell: Callable[[str], None],
) -> T:
    """What ``attempt(seconds left of the deadline, restart_count)`` returns, at the latest the last time.

    What somebody ended, or whose time was over, is not started again. ``tell`` gets why, before each restart.
    """
    start, left = time.monotonic(), deadline
    for restart_count in range(max_restarts):
        try:
            return attempt(left, restart_count)
        except Exception as error:
            report = report_of(error)
            if report is None or not report.failures or isinstance(report, LaunchTimeout):
                raise
            if any(failure.final for failure in report.failures):
                raise
            why = str(report).partition("\n")[0]
            tell(f"{name} is started again (restart {restart_count + 1} of at most {max_restarts}): {why}")
        if deadline is not None:
            left = max(0.001, deadline - (time.monotonic() - start))
    return attempt(left, max_restarts)
