"""Restarts of all ranks after a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, report_of
from mlaunch.base.frames import innermost_users
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.launch.settle import Steps
from mlaunch.caller.report.notebook import short_name

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts

_OF_IMPORTS = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
_MISUSE = 2  # the exit code of argparse for a wrong command line
_MOST_STUCK = 2  # attempts
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def with_restarts(
    attempt: Callable[[Attempt], Steps],
    name: str,
    deadline: float | None,
    max_restarts: int,
    tell: Callable[[str], None],
    parts: CallerParts | None = None,
    is_to_stop: Callable[[], object] = bool,
) -> Steps:
    """Make attempts at a call, with at most ``max_restarts`` after the first one; return how the last one ended.

    No attempt follows if somebody ended the call, its time was over, ``is_to_stop`` says so, or a restart does not help
    (see ``Course``). ``tell`` gets the reason, before each restart, or instead of one. ``deadline``: of all attempts
    together, in seconds.
    """
    start, left, course = time.monotonic(), deadline, Course()
    for restart_count in range(max_restarts):
        ended = yield from attempt(Attempt(restart_count, left, parts))
        last = is_to_stop() or (parts is not None and parts.is_last())
        if last or not may_be_repeated(ended.error) or not course.goes_on(ended.error, name, tell):
            return ended
        tell(again(name, restart_count, max_restarts, ended.error))
        if deadline is not None:
            left = max(0.0, deadline - (time.monotonic() - start))
    ended = yield from attempt(Attempt(max_restarts, left, parts))
    if may_be_repeated(ended.error):
        course.goes_on(ended.error, name, bool)
    return ended


class Course:
    """The course of one call's attempts. After two that end alike, there is no third one.

    They end alike by a mistake that a restart meets again: an import that fails at the same line, or exit code 2 (a
    script's wrong command line). Or because they got no further: neither came beyond the step of ``mlaunch.report``
    that was reached before them.
    """

    def __init__(self) -> None:
        self._mistake = ""  # of the last attempt
        self._best: float | None = None  # the furthest step
        self._stuck = 0  # attempts in a row that did not come beyond it

    def goes_on(self, error: BaseException | None, name: str, tell: Callable[[str], object]) -> bool:
        """Take how an attempt failed; return False, and tell why, if another one would fail in the same way."""
        report = report_of(error) if error is not None else None
        if report is None:
            return True
        if why := self._same_mistake(report) or self._no_step(report):
            report.kind = "no_progress"
            tell(f"{name} is not started again: {why}")
        return not why

    def _same_mistake(self, report: LaunchError) -> str:
        cause = report.failures[0]
        of_import = cause.type_name.rpartition(".")[2] in _OF_IMPORTS
        mistake = f"{cause.what}{_line_of(report)}" if of_import or cause.exitcode == _MISUSE else ""
        before, self._mistake = self._mistake, mistake
        return (
            f"two attempts in a row have ended so, and a third would: {mistake}"
            if mistake and mistake == before
            else ""
        )

    def _no_step(self, report: LaunchError) -> str:
        reached, best = report.reached, self._best
        if reached is not None and (best is None or reached > best):
            self._best, self._stuck = reached, 0
        elif best is not None:
            self._stuck += 1
        if self._stuck < _MOST_STUCK:
            return ""
        return f"two attempts in a row have not come beyond step {self._best:g}, by mlaunch.report"


def again(name: str, restart_count: int, max_restarts: int, error: BaseException | None) -> str:
    """Return the sentence that says that the call is started again, and why."""
    report = report_of(error) if error is not None else None
    why = str(report or "").partition("\n")[0] + _line_of(report)
    return f"{name} is started again (restart {restart_count + 1} of at most {max_restarts}): {why}"


def _line_of(report: LaunchError | None) -> str:
    """Return the line of user code that raised the cause, " (train.py:29)"; "" if it is unknown."""
    frames = _FRAME.findall(report.failures[0].traceback)[::-1] if report is not None and report.failures else []
    place = innermost_users([file for file, _ in frames])
    return "" if place is None else f" ({short_name(frames[place][0])}:{frames[place][1]})"


def may_be_repeated(error: BaseException | None) -> bool:
    """True if the failure may not happen again."""
    report = report_of(error) if isinstance(error, Exception) else None
    if report is None or not report.failures or isinstance(report, LaunchTimeout):
        return False
    # A value that cannot be pickled will not be picklable the next time.
    return not any(failure.final for failure in report.failures) and report.kind != "not_picklable"
