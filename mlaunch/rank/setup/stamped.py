"""Notes when a rank writes what, so that who reads the pipes of several ranks can tell which line came first."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class StampedFile(io.FileIO):
    """A standard stream of a rank. ``stamp`` notes the time of the bytes from one position to another.

    It does so before they are written, so that no reader is ahead of it.
    """

    def __init__(self, fd: int, stamp: Callable[[int, int], None]) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._stamp = stamp
        self._written = 0

    def write(self, data: Any) -> int:
        self._stamp(self._written, self._written + len(data))
        written = super().write(data) or 0
        self._written += written
        return written
