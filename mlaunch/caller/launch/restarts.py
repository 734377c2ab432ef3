"""Starts all ranks again after a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, report_of
from mlaunch.base.frames import innermost_users
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.report.notebook import short_name

_FRAME = re.compile(r'File "(.+?)", line (\d+)')


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
    report = report_of(error) if error is not None else None
    why = str(report or "").partition("\n")[0] + _line_of(report)
    return f"{name} is started again (restart {restart_count + 1} of at most {max_restarts}): {why}"


def _line_of(report: LaunchError | None) -> str:
    """Says in which line of user code the cause was raised: " (train.py:29)"; "" if nobody knows."""
    frames = _FRAME.findall(report.failures[0].traceback)[::-1] if report is not None and report.failures else []
    place = innermost_users([file for file, _ in frames])
    return "" if place is None else f" ({short_name(frames[place][0])}:{frames[place][1]})"


def may_be_repeated(error: BaseException | None) -> bool:
    """Tells whether it is a failure that may not come again."""
    report = report_of(error) if isinstance(error, Exception) else None
    if report is None or not report.failures or isinstance(report, LaunchTimeout):
        return False
    return not any(failure.final for failure in report.failures)
