"""The caller's part of an agreed stop: signals to this process (``stop_on``), ``Ranks.stop`` and similar requests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from mlaunch.agreed_stop.wire import NAME, AskToStop, StopAgreed, StopOverdue, StopTerms
from mlaunch.base.exceptions import misuse
from mlaunch.base.text import signal_name, signals_of
from mlaunch.caller.report.launch_report import Stopped
from mlaunch.core.parts import CallerPart
from mlaunch.core.records import Note

if TYPE_CHECKING:
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.core.parts import Spell


class StopPart(CallerPart):
    """The requests to all attempts of a call; one that begins after the signal gets it, too, and is the last."""

    def __init__(self, options: Options) -> None:
        given = options.stop_on
        self._numbers = () if given is None else signals_of(f"stop_on={given!r}", given)
        self.section = StopTerms(options.stop_grace, self._numbers)
        self._before: dict[int, Any] = {}
        self._tell: Callable[[object], None] | None = None
        self._reason = ""  # "": nobody has asked

    @property
    def is_last(self) -> bool:
        return bool(self._reason)

    def around(self) -> StopPart:
        """Return this object, a context manager that handles the signals instead of the handlers before."""
        return self

    def __enter__(self) -> None:
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise misuse(
                RuntimeError(
                    "stop_on= works only in the main thread, where Python handles signals: call from there, or leave "
                    "stop_on out and use mlaunch stop"
                )
            )
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._take)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: C code had set a handler

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if not self._reason:
            self._reason = signal_name(number)
            if self._tell is not None:
                self._tell(AskToStop(self._reason))

    def attach(self, tell: Callable[[object], None]) -> None:
        self._tell = tell
        if self._reason:
            tell(AskToStop(self._reason))


def part(options: Options, _spell: Spell) -> StopPart:
    return StopPart(options)


class TakesWords(Protocol):
    """A launch, or a call on ranks that stay."""

    def tell_part(self, feature: str, word: object) -> None: ...


def ask_to_stop(launch: TakesWords, reason: str) -> None:
    """Ask the ranks to stop at a step that they agree on, as soon as there are ranks."""
    launch.tell_part(NAME, AskToStop(reason))


def noted(news: object, name: str) -> Note:
    """Return the note that a launch of this name makes of its agent's news."""
    if isinstance(news, StopAgreed):
        return Note(facts={"stopped": Stopped(news.reason, news.asked, news.check)})
    if isinstance(news, StopOverdue):
        return Note(
            f"{name} was asked to stop {news.seconds:g} s ago and still runs: {news.why}; it will be ended in "
            f"{news.left:g} s"
        )
    return Note()
