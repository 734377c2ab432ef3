"""What belongs to a record and is large: on its way from a file into a stream, and from there into a memfd."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from mlaunch.base.fds import memory_file
from mlaunch.engines.wire.frame_codes import Code

# As much as an unprivileged user may make of a pipe (fs.pipe-max-size).
CHUNK = 1 << 20  # bytes that are read or written at once


@dataclass
class Piece:
    """What waits to be written: bytes, or the rest of a file and then its code."""

    data: memoryview
    fd: int = -1
    offset: int = 0
    size: int = 0
    code: Code | None = None

    def next(self) -> memoryview:
        """Returns what comes next; empty at the end."""
        if not self.data and self.code is not None:
            self.data = memoryview(self._read() if self.offset < self.size else self._finish(self.code))
        return self.data

    def _read(self) -> bytes:
        # pread: several streams may be sent the same file, whose place they would share.
        data = os.pread(self.fd, min(CHUNK, self.size - self.offset), self.offset)
        self.offset += len(data)
        if not data:
            raise OSError(f"a file of {self.size} bytes ended before its end; who cut it?")
        if self.code is not None:
            self.code.update(data)
        return data

    def _finish(self, code: Code) -> bytes:
        self.code = None
        return code.digest()

    @property
    def left(self) -> int:
        return len(self.data) + max(0, self.size - self.offset)


class Content:
    """A record whose content is on its way into a memfd. ``code``: of what has come."""

    def __init__(self, record: bytes, size: int, code: Code) -> None:
        self.record = record
        self.code = code
        self.size = size
        self._left = size
        self._fd = memory_file("content") if size else -1

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
        self.code.update(data)
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
