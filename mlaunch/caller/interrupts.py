"""Ctrl-C at the moments that a launch chooses: never between getting a descriptor or a record and keeping it.

Python runs signal handlers between any two steps of its main thread. A KeyboardInterrupt there loses what was just
received. So a launch defers the handler, and allows it where it waits or runs user code, and nothing is in flight.
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
        self.handler = handler
        self._pending: list[tuple[int, FrameType | None]] = []

    def begin(self) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: self._pending.append((number, frame)))

    def end(self, *, fire: bool = True) -> None:
        """Puts the handler back, and has it handle what came; ``fire`` False: that is dropped."""
        signal.signal(signal.SIGINT, self.handler)
        pending, self._pending = self._pending, []
        if pending and fire:
            self.handler(*pending[0])


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
            self._deferral = _Deferral(handler)
            _deferrals.append(self._deferral)
            self._deferral.begin()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._deferral is not None:
            _deferrals.remove(self._deferral)
            self._deferral.end(fire=kind is None)  # not if an exception is on its way already


class allowed:
    """Handles SIGINT as it comes, while the block runs; also one that was deferred."""

    def __enter__(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        self._deferral = _deferrals[-1] if here and _deferrals else None
        if self._deferral is not None:
            try:
                self._deferral.end()
            except BaseException:
                self._deferral.begin()
                raise

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.begin()


def wait_readable(fds: Sequence[int], timeout: float | None = None) -> list[int]:
    """Waits as ``linux.wait_readable``, and can be interrupted."""
    with allowed():
        return linux.wait_readable(fds, timeout)
