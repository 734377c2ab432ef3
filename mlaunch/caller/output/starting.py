"""The line that is shown before there is a launch that could tell of itself: while torch is imported, or devices are
waited for.
"""

from __future__ import annotations

import time

from mlaunch.caller.output.console import Console
from mlaunch.caller.output.display import Area, Display


class StartingLine:
    """Shows the line, if it is asked to, until the block ends. ``place``: where lines change; None: nowhere.

    No context manager of contextlib's; see ``interrupts``.
    """

    def __init__(self, name: str, place: Area | None) -> None:
        self._name = name
        self._display = Display(place, time.monotonic())
        self._shown = False

    def show(self) -> None:
        """Shows that the call has begun, and what it waits for."""
        self.tell(f"{self._name}  starting: importing torch")

    def tell(self, text: str) -> None:
        """Shows this."""
        with Display.lock:
            self._shown = True
            self._write(self._display.draw([text], time.monotonic()))

    def __enter__(self) -> StartingLine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._shown:
            with Display.lock:
                self._write(self._display.close([f"{self._name}  failed"] if kind is not None else []))

    def _write(self, text: str) -> None:
        console = Console()
        console.write(2, text.encode())
        console.close()
