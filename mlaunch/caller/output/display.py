"""The lines that change while a launch runs: what it is doing, and ranks' progress bars.

On a terminal they stand below what is printed (rich draws them), in a notebook at the top of the cell's output.
Elsewhere, or without rich on a terminal, there are none.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import uuid
from typing import Any, Protocol

_PATIENCE = 0.5  # seconds until the first look: a quick call shows nothing
_PERIOD = 0.1  # seconds between two looks


class Area(Protocol):
    """Where lines can be replaced."""

    def show(self, text: str) -> None: ...

    def hide(self) -> None:
        """Makes room for what is printed."""

    def close(self, lines: list[str]) -> None:
        """Leaves of these what should stay."""


class Terminal:
    """Needs rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stderr)
        self._live: Any = None

    def show(self, text: str) -> None:
        from rich.live import Live
        from rich.text import Text

        looks = Text(text, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(looks, console=self._console, auto_refresh=False, transient=True,
                              redirect_stdout=False, redirect_stderr=False)  # fmt: skip
            self._live.start(refresh=True)
        else:
            self._live.update(looks, refresh=True)

    def hide(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None

    def close(self, lines: list[str]) -> None:
        """The first was of interest while it changed."""
        self.hide()
        for line in lines[1:]:
            self._console.print(line, markup=False, highlight=False)


class Notebook:
    """An output of the running cell, replaced each time."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._shown = ""

    def show(self, text: str) -> None:
        import IPython.display

        display: Any = IPython.display.display  # untyped
        if text != self._shown:
            data = {"text/plain": text}
            display(data, raw=True, display_id=self._id, update=bool(self._shown))
        self._shown = text

    def hide(self) -> None:
        """What is printed goes below."""

    def close(self, lines: list[str]) -> None:
        if self._shown and lines:
            self.show("\n".join(lines))


def area() -> Area | None:
    """The place for changing lines that this process has; None if it has none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return Notebook()
    with contextlib.suppress(AttributeError, ValueError, ImportError):
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            return Terminal()
    return None


class Display:
    """Draws the lines when they are due. ``start``: when the launch began, on the caller's clock.

    Of launches at the same time, in several threads, the first that is drawn has the place.
    """

    _taken = threading.Lock()

    def __init__(self, place: Area | None, start: float) -> None:
        self._area = place
        self._shown = False
        self.due = None if place is None else start + _PATIENCE

    def draw(self, lines: list[str], now: float) -> None:
        self.due = now + _PERIOD
        if self._area is not None and (self._shown or self._taken.acquire(blocking=False)):
            self._shown = True
            self._area.show("\n".join(lines))

    def make_room(self) -> None:
        """Something is about to be printed."""
        if self._area is not None and self._shown:
            self._area.hide()

    def close(self, lines: list[str]) -> None:
        if self._area is not None and self._shown:
            try:
                self._area.close(lines)
            finally:  # a closed terminal must not keep the place from later launches
                self._taken.release()
        self._area = self.due = None
