"""The streams on which people see the output of ranks: this process's present ``sys.stdout`` and ``sys.stderr``.

So it arrives in the running cell of a notebook, and in the capture of a test. Until the launch is over, nothing here
waits for the reader of a pipe or terminal: what it does not take now is kept in order.
"""

from __future__ import annotations

import io
import math
import os
import select
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mlaunch.caller import interrupts

_READER_TIMEOUT = 2.0  # seconds in which nobody reads, after which nobody will
_LEAST = select.PIPE_BUF  # bytes: so many go at once into a pipe that takes any, unless others write to it, too
_MOST = 1 << 20


class Console:
    """Two streams, written to in the order of printing.

    One that cannot be written to (its reader has left) is given up: that must not end a training.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._outlets: dict[int, Outlet] = {}  # by stream
        self._lost: set[int] = set()
        self._unread: dict[int, int] = {}  # bytes that were given up, by stream
        self._interrupt: BaseException | None = None
        self._begun = False  # the latest write may have written something

    def write(self, stream: int, data: bytes) -> None:
        """Write data, after all that still waits."""
        if stream in self._unread:
            self._unread[stream] += len(data)
        if stream in self._lost or not data:
            return
        # One queue for both streams, to keep their common order.
        self._waiting.append((stream, memoryview(data)))
        if len(self._waiting) == 1:
            self.drain()

    def say(self, text: str) -> None:
        """Write a message of mlaunch."""
        self.write(2, f"mlaunch: {text}\n".encode(errors="backslashreplace"))

    @property
    def blocked(self) -> int | None:
        """The descriptor that must take more before ``drain`` can go on; None if nothing waits."""
        return self._outlets[self._waiting[0][0]].fd if self._waiting else None

    def drain(self) -> bool:
        """Write what can be written without waiting; True if nothing is left."""
        while self._waiting:
            stream, data = self._waiting[0]
            written = self._try_write(stream, data)
            if written == 0:
                return False
            if written < len(data):
                self._waiting[0] = stream, data[written:]
            else:
                self._waiting.popleft()
        return True

    def wait(self, until: float = math.inf) -> None:
        """Wait until all is written; after ``until``, in monotonic seconds, only while somebody reads."""
        while not self.drain():
            self.raise_interrupt()  # before the next wait; what is not written yet stays
            patience = max(until - time.monotonic(), _READER_TIMEOUT)
            # Not in a thread: one that hangs in a write at the interpreter's end would hold the stream's lock.
            poll = select.poll()
            poll.register(self.blocked or 0, select.POLLOUT)
            with interrupts.allowed():
                ready = poll.poll(None if math.isinf(patience) else patience * 1000)
            if not ready:
                self._leave_unread(self._waiting[0][0])
        self.raise_interrupt()

    def finish(self, until: float = math.inf) -> None:
        """Wait as ``wait`` does, after the last write, and say how much of it nobody has read."""
        self.wait(until)
        size = self._unread.pop(1, 0)
        if size:
            self.say(f"nobody reads stdout; the last {size} bytes of what ranks printed there are not shown")
            self.wait(until)

    def raise_interrupt(self) -> None:
        """Raise the exception of a signal handler that came while a stream object was busy, such as Ctrl-C."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Drop what still waits."""
        self._waiting.clear()
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()

    def _try_write(self, stream: int, data: memoryview) -> int:
        """Return how many bytes are done with: written, or given up."""
        began = time.monotonic()
        if stream in self._lost:
            return len(data)
        try:
            return self._write(stream, data)
        except BaseException as error:
            if isinstance(error, Exception) and not interrupts.by_handler(error):
                self._lost.add(stream)  # None, gone, full, closed; a stream object may raise anything
                return len(data)
            self._interrupt = error
            if time.monotonic() - began > _READER_TIMEOUT:  # its reader is slow, and would be the next time, too
                self._lost.add(stream)
            elif not self._begun:  # it came in the flush before; a file can wait for the next turn
                return 0 if stream in self._outlets else self._try_write(stream, data)
        return len(data)

    def _write(self, stream: int, data: memoryview) -> int:
        """Return how many bytes were written; 0 if none can be without waiting."""
        # The present streams: a test captures, and a notebook changes them from cell to cell.
        target: Any = sys.stdout if stream == 1 else sys.stderr
        fd, self._begun = _descriptor(target), False
        if fd is not None:
            return self._outlet(stream, fd).write(data, target.flush)
        if stream in self._outlets:
            self._outlets.pop(stream).close()
        with interrupts.allowed():  # user code, maybe
            if isinstance(target, io.TextIOWrapper):
                target.flush()
                self._begun = True
                target.buffer.write(data)
            else:  # such as a notebook's
                self._begun = True
                target.write(bytes(data).decode(errors="backslashreplace"))
            target.flush()
        return len(data)

    def _outlet(self, stream: int, fd: int) -> Outlet:
        outlet = self._outlets.get(stream)
        if outlet is None or not outlet.leads_to(fd):
            self._outlets[stream], before = Outlet(fd), outlet
            if before is not None:
                before.close()
        return self._outlets[stream]

    def _leave_unread(self, stream: int) -> None:
        self._lost.add(stream)
        self._unread[stream] = sum(len(data) for number, data in self._waiting if number == stream)
        self._waiting = deque(item for item in self._waiting if item[0] != stream)


def _descriptor(stream: Any) -> int | None:
    """Return the descriptor that a stream writes to, if there are only Python's own buffers in between."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return raw.fileno() if isinstance(raw, io.FileIO) else None


class Outlet:
    """A file that is written to without waiting for its reader.

    Whether a write waits is a property of the open file, which other processes share. So pipes and terminals are opened
    once more. Others (a socket, another user's terminal) are written to in small pieces, when they take any.
    """

    def __init__(self, fd: int) -> None:
        self._most = _MOST
        found = os.fstat(fd)
        self._identity = found.st_dev, found.st_ino
        if stat.S_ISREG(found.st_mode):  # never waits; opened once more, it would be written from its start
            self.fd = os.dup(fd)
            return
        try:
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            # A pipe is ready for poll when it takes so much: a write of more could wait for its reader.
            self.fd, self._most = os.dup(fd), _LEAST

    def leads_to(self, fd: int) -> bool:
        """True if ``fd`` is still the file that this was made for."""
        found = os.fstat(fd)
        return (found.st_dev, found.st_ino) == self._identity

    def write(self, data: memoryview, before: Callable[[], object]) -> int:
        """Return how many bytes were written; 0 if none can be now. ``before`` writes what comes before."""
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
