"""Lines that change in place while a launch runs: none without a terminal, a notebook or ``mlaunch/display``."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from mlaunch.base.fds import renewed
from mlaunch.base.log import log
from mlaunch.caller.output.console import Console
from mlaunch.caller.output.harmless import harmless
from mlaunch.caller.report import notebook
from mlaunch.core import load

SILENCE = 2.0  # seconds of a wait that the log does not mention


class LiveLines:
    """The changing lines of one launch: none. Write what the methods return to stderr, under ``lock``."""

    # Of all launches: two that draw at once would move each other's cursor.
    lock = renewed(threading.RLock())
    holder: Any = None  # the lines that are drawn now, of any launch
    due: float | None = None  # the time to draw them again

    def draw(self, lines: list[str], now: float) -> str:  # noqa: ARG002
        """Show these lines in place of the last ones."""
        return ""

    def postpone(self, now: float) -> None:
        """Draw later."""

    def make_room(self) -> str:
        """Make room for output, whichever launch draws lines now."""
        with harmless():
            return str(LiveLines.holder.hide()) if LiveLines.holder is not None else ""
        LiveLines.holder = None
        self.give_up()
        return ""

    def close(self, lines: list[str]) -> str:  # noqa: ARG002
        """Draw the final state of these lines."""
        return ""

    def give_up(self) -> None:
        """Draw nothing more."""


class LivePlace:
    """A place for changing lines, which a feature draws."""

    def lines(self, start: float) -> LiveLines:
        """Begin the lines of a launch. ``start``: when it began, on the caller's clock."""
        raise NotImplementedError


def live_place(*, blocks: bool = True) -> LivePlace | None:
    """Return this process's place for changing lines; None if it has none.

    ``blocks``: the call waits for its ranks. Otherwise its lines would be drawn over the prompt of a terminal.
    """
    has_terminal = False
    with contextlib.suppress(AttributeError, ValueError):  # None, closed
        has_terminal = sys.stderr.isatty()
    if not has_terminal and not notebook.is_here():
        return None
    drawing = load.at_hand("display", "caller")
    found: LivePlace | None = None if drawing is None else drawing.area(blocks=blocks)
    return found


class StartingLine:
    """A line before there is a launch to show: while torch is imported, or devices are waited for.

    Once shown, it stays until the block ends. ``place``: the place for changing lines; None: there is none.

    Not a contextlib context manager; see ``interrupts``.
    """

    def __init__(self, name: str, place: LivePlace | None) -> None:
        self._name = name
        self._lines = None if place is None else place.lines(time.monotonic())
        self._shown = self._logged = False
        # Before a wait is mentioned: waiting for the end of the previous call is short, and no news for a log.
        self.silence = SILENCE if place is None else 0.0

    def show(self) -> None:
        """Show that the call has begun, and waits for the import of torch."""
        self.tell(f"{self._name}  starting: importing torch")

    def tell_wait(self, text: str) -> None:
        """Show what the call waits for, maybe for hours; without changing lines, once in the log."""
        if self._lines is not None:
            self.tell(text)
        elif not self._logged:
            self._logged = True
            log.warning("%s", text)

    def tell(self, text: str) -> None:
        """Show a text in the line's place."""
        if self._lines is not None:
            with LiveLines.lock:
                self._shown = True
                _write(self._lines.draw([text], time.monotonic()))

    def __enter__(self) -> StartingLine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._lines is not None and self._shown:
            with LiveLines.lock:
                _write(self._lines.close([f"{self._name}  failed"] if kind is not None else []))


def _write(text: str) -> None:
    console = Console()
    console.write(2, text.encode())
    console.close()
