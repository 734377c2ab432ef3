"""Signals by which a scheduler asks what an engine has started to stop: the caller is to hear of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from types import FrameType

from mlaunch.base import signals


class SignalsHere:
    """Takes them from now on. A member that is a thread leaves them to its process."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._reason = ""
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._reason = signals.name_of(number)

    def take(self) -> str:
        """Returns the name of one that has come, once; "": none has."""
        reason, self._reason = self._reason, ""
        return reason
