"""A call that is asked to stop: by signals to this process (``stop_on``), or by ``Ranks.stop``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mlaunch.base import signals
from mlaunch.base.misuse import misuse


class StopSignal(BaseException):
    """A signal to this process, which its ranks are to get as well, and end by."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopOrder:
    """Holds over the attempts of a call: one that begins after the order hears of it, too.

    A context manager, but not contextlib's, which would set attributes of what passes through it. Within it the
    signals ask the ranks, whatever they did before.
    """

    def __init__(self, stop_on: str | None) -> None:
        self._numbers = signals.numbers_of_option(stop_on)
        self._before: dict[int, Any] = {}
        self._pass_on: Callable[[str], object] | None = None
        self.reason = ""  # why; "": it was not asked for

    def __enter__(self) -> StopOrder:
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise misuse(
                RuntimeError(
                    "stop_on= in a call from another thread than the main one, where Python hears no signals: call "
                    "from the main thread, or leave stop_on out and ask with mlaunch stop"
                )
            )
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that C code has set

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.ask(signals.name_of(number))

    def ask(self, reason: str) -> None:
        """Asks; a second time changes nothing."""
        if not self.reason:
            self.reason = reason
            if self._pass_on is not None:
                self._pass_on(reason)

    def attach(self, pass_on: Callable[[str], object]) -> None:
        """Tells an attempt that a stop was asked for, also one that begins later."""
        self._pass_on = pass_on
        if self.reason:
            pass_on(self.reason)
