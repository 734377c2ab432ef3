"""Starts all ranks again after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlaunch.base.exceptions import LaunchTimeout, report_of
from mlaunch.caller.launch.settle import Ended


def with_restarts(
    attempt: Callable[[float | None, int], Ended],
    name: str,
    deadline: float | None,
    max_restarts: int,
    tell: Callable[[str], None],
    is_to_stop: Callable[[], object] = bool,
) -> Ended:
    """Returns how ``attempt(seconds left of the deadline, restart_count)`` ended, at the latest the last time.

    What somebody ended, or whose time was over, is not started again, nor what ``is_to_stop``. ``tell`` gets why,
    before each restart.
    """
    start, left = time.monotonic(), deadline
    for restart_count in range(max_restarts):
        ended = attempt(left, restart_count)
        if is_to_stop() or not may_be_repeated(ended.error):
            return ended
        tell(again(name, restart_count, max_restarts, ended.error))
        if deadline is not None:
            left = max(0.0, deadline - (time.monotonic() - start))
    return attempt(left, max_restarts)


def again(name: str, restart_count: int, max_restarts: int, error: BaseException | None) -> str:
    """Says that it is started again, and why."""
    why = str(report_of(error) if error is not None else "").partition("\n")[0]
    return f"{name} is started again (restart {restart_count + 1} of at most {max_restarts}): {why}"


def may_be_repeated(error: BaseException | None) -> bool:
    """Tells whether it is a failure that may not come again."""
    report = report_of(error) if isinstance(error, Exception) else None
    if report is None or not report.failures or isinstance(report, LaunchTimeout):
        return False
    return not any(failure.final for failure in report.failures)
