"""Writes to a file without waiting for whoever reads it."""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Callable
from typing import Any

from mlaunch.caller import interrupts

_LEAST = select.PIPE_BUF  # bytes: so many go at once into a pipe that takes any, unless others write to it, too
_MOST = 1 << 20


def descriptor(stream: Any) -> int | None:
    """Returns the file that a stream writes to, if nothing but buffers of Python's own stand between."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return raw.fileno() if isinstance(raw, io.FileIO) else None


class Outlet:
    """A way of our own to an open file.

    Whether a write waits is a property of the open file, which other processes have, too. So pipes and terminals are
    opened anew. What cannot be (a socket, another user's terminal) is written to in small pieces, when it takes any.
    """

    def __init__(self, fd: int) -> None:
        self._most = _MOST
        found = os.fstat(fd)
        self._identity = found.st_dev, found.st_ino
        if stat.S_ISREG(found.st_mode):  # never waits; opened anew, it would be written from its start
            self.fd = os.dup(fd)
            return
        try:
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            # Poll says that a pipe is ready when it takes so much: a write of more could wait for its reader.
            self.fd, self._most = os.dup(fd), _LEAST

    def leads_to(self, fd: int) -> bool:
        """Tells whether ``fd`` is still the file that this was made for."""
        found = os.fstat(fd)
        return (found.st_dev, found.st_ino) == self._identity

    def write(self, data: memoryview, before: Callable[[], object]) -> int:
        """Returns how much was written; 0 if nothing can be now. ``before``: writes what comes before it."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            return 0
        with interrupts.allowed():  # if others wrote to the stream, this may wait
            before()
        try:
            return os.write(self.fd, data[: self._most])
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.fd)
