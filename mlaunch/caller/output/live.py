"""What changes in place while a launch runs: nothing, where nobody watches or ``mlaunch/display`` is not there."""

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

SILENCE = 2.0  # seconds of a wait that the log does not tell of


class LiveLines:
    """The lines of one launch that change: none. What methods return is to be written to stderr under ``lock``."""

    # Of all launches: two that draw at once would each move the other's cursor.
    lock = renewed(threading.RLock())
    holder: Any = None  # what is drawn now, of whichever launch
    due: float | None = None  # when they are to be drawn again

    def draw(self, lines: list[str], now: float) -> str:  # noqa: ARG002
        """Show these lines in place of the last ones."""
        return ""

    def postpone(self, now: float) -> None:
        """Draw later."""

    def make_room(self) -> str:
        """Make room for what is about to be printed, whichever launch draws."""
        with harmless():
            return str(LiveLines.holder.hide()) if LiveLines.holder is not None else ""
        LiveLines.holder = None
        self.give_up()
        return ""

    def close(self, lines: list[str]) -> str:  # noqa: ARG002
        """Leave of these what should stay."""
        return ""

    def give_up(self) -> None:
        """Draw nothing more."""


class LivePlace:
    """Where lines can change, as a feature draws them."""

    def lines(self, start: float) -> LiveLines:
        """Begin the lines of a launch that began then, on the caller's clock."""
        raise NotImplementedError


def live_place(*, blocks: bool = True) -> LivePlace | None:
    """Return the place for changing lines that this process has; None if it has none.

    ``blocks``: the call waits for its ranks. Lines of one that does not would be drawn over the prompt of a terminal.
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
    """Shows a line before there is a launch that could tell of itself: while torch is imported, devices are waited for.

    It is shown if it is asked to, until the block ends. ``place``: where lines change; None: nowhere.

    Not a contextlib context manager; see ``interrupts``.
    """

    def __init__(self, name: str, place: LivePlace | None) -> None:
        self._name = name
        self._lines = None if place is None else place.lines(time.monotonic())
        self._shown = self._logged = False
        # Until there is a word of a wait. The end of the call before is a short one, and no news in a log.
        self.silence = SILENCE if place is None else 0.0

    def show(self) -> None:
        """Show that the call has begun, and what it waits for."""
        self.tell(f"{self._name}  starting: importing torch")

    def tell_wait(self, text: str) -> None:
        """Show for what the call waits; once, in the log, where no lines change: it may be for hours."""
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
