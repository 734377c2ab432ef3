"""The calls of a decorated function: how many run, and the reports of the latest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlaunch.caller.report.launch_report import LaunchReport

_KEPT = 20  # reports
_PERIOD = 0.1  # seconds between two checks: so no call has to wake a waiting thread at its end


class CallLog:
    """The calls of a function and its copies, which ``options`` and methods make. Several threads may call at once."""

    def __init__(self) -> None:
        self.reports: deque[Callable[[], LaunchReport]] = deque(maxlen=_KEPT)  # make them; the latest last
        self._running: list[None] = []  # one for each call; a list needs no lock

    def begin(self) -> None:
        """Count a call that begins."""
        self._running.append(None)

    def end(self, _how: object = None) -> None:
        """Count a call that is over."""
        self._running.pop()

    @property
    def running(self) -> int:
        """The number of calls that run, or wait for what they need."""
        return len(self._running)

    def wait_over(self, seconds: float) -> bool:
        """Wait until no call runs, for ``seconds`` at most; True if none does."""
        until = time.monotonic() + seconds
        while self._running and (left := until - time.monotonic()) > 0:
            time.sleep(min(_PERIOD, left))
        return not self._running
