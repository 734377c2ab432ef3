"""Ctrl-C at the moments that a launch chooses: never between getting a descriptor or a record and keeping it.

Python runs signal handlers between any two steps of its main thread. A KeyboardInterrupt there loses what was just
received. So a launch defers the handler, and allows it where it waits or runs user code, and nothing is in flight.

The handler of a deferral stays in place from its beginning to its end, and a switch says whether it passes signals
on. Were handlers exchanged instead, a KeyboardInterrupt just before the exchange would leave the wrong one behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from mlaunch.base import linux

_Handler = Callable[[int, FrameType | None], Any]


class _Deferral:
    """One deferral of SIGINT. ``handler``: what handles it otherwise."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._open = False
        self._pending: list[tuple[int, FrameType | None]] = []

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal, now or later."""
        self._pending.append((number, frame))
        if self._open:
            self._fire()

    def open(self) -> None:
        self._open = True
        self._fire()

    def close(self) -> None:
        self._open = False

    def end(self, *, fire: bool) -> None:
        """Puts the handler back, and has it handle what came; ``fire`` False: that is dropped."""
        if signal.getsignal(signal.SIGINT) == self.take:  # else code of the user's has set another
            signal.signal(signal.SIGINT, self._handler)
        if fire:
            self._fire()

    def _fire(self) -> None:
        try:
            if self._pending:
                number, frame = self._pending[0]
                self._pending = []  # however often it came meanwhile: as the kernel does
                self._handler(number, frame)
        except BaseException:
            self._open = False  # it leaves the block that was open
            raise


_deferrals: list[_Deferral] = []  # the innermost last: a __reduce__ may launch, too


# No context managers of contextlib's, which set attributes of the exceptions that pass through them: some refuse.


class deferred:
    """Defers SIGINT to the next ``allowed``, or to the end of the block.

    Does nothing outside of the main thread, which alone runs handlers, or where SIGINT has no handler of Python's.
    """

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        self._deferral: _Deferral | None = None
        if threading.current_thread() is threading.main_thread() and callable(handler):
            deferral = _Deferral(handler)
            signal.signal(signal.SIGINT, deferral.take)  # first: from here on no signal keeps us from the rest
            _deferrals.append(deferral)
            self._deferral = deferral

    def __exit__(self, kind: object, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.close()
            _deferrals.remove(self._deferral)
            self._deferral.end(fire=kind is None)  # not if an exception is on its way already


class allowed:
    """Handles SIGINT as it comes, while the block runs; also one that was deferred."""

    def __enter__(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        self._deferral = _deferrals[-1] if here and _deferrals else None
        if self._deferral is not None:
            self._deferral.open()

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.close()


def wait_readable(fds: Sequence[int], timeout: float | None = None) -> list[int]:
    """Waits as ``linux.wait_readable``, and can be interrupted."""
    with allowed():
        return linux.wait_readable(fds, timeout)
