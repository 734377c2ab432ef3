"""What belongs to a record and is large, on its way from a stream into a memfd."""

from __future__ import annotations

import os
from collections.abc import Callable

from mlaunch.protocol import payload

CHUNK = 1 << 20  # bytes that are read or written at once


class Content:
    """A record whose content is on its way into a memfd."""

    def __init__(self, record: bytes, size: int) -> None:
        self.record = record
        self._left = size
        self._fd = payload.create("content") if size else -1

    def fill(self, incoming: int, note_life: Callable[[], None]) -> None:
        """Moves the rest straight from the stream into the memfd. BlockingIOError: it has not all come."""
        while self._left:
            data = os.read(incoming, min(CHUNK, self._left))
            if not data:
                raise EOFError("the other end of the stream is closed")
            note_life()
            self._write(data)

    def take(self, came: bytearray) -> bool:
        """Takes it from what has come before; True if nothing lacks."""
        most = min(self._left, len(came))
        if most:
            self._write(bytes(came[:most]))
            del came[:most]
        return self._left == 0

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._left -= len(data)

    def release(self) -> int:
        """Returns the memfd; the receiver owns it."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """May be called again."""
        fd = self.release()
        if fd >= 0:
            os.close(fd)
