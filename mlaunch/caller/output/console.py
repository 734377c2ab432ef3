"""Where people see what ranks print: this process's ``sys.stdout`` and ``sys.stderr`` of the moment.

So it arrives in the running cell of a notebook, and in what a test captures. Nothing here waits for whoever reads a
pipe or a terminal, until the launch is over: what they do not take now waits its turn.
"""

from __future__ import annotations

import io
import math
import select
import sys
import time
from collections import deque
from typing import Any

from mlaunch.caller import interrupts
from mlaunch.caller.output.outlet import Outlet, descriptor

_READER_TIMEOUT = 2.0  # seconds in which nobody reads, after which nobody will


class Console:
    """Two streams, written to in the order of what is printed.

    One that cannot be written to (a reader that left) is given up: that must not end a training.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._outlets: dict[int, Outlet] = {}  # by stream
        self._lost: set[int] = set()
        self._unread: dict[int, int] = {}  # bytes that were given up, by stream
        self._interrupt: BaseException | None = None
        self._begun = False  # the latest write may have written something

    def write(self, stream: int, data: bytes) -> None:
        """Writes data, after what waits."""
        if stream in self._unread:
            self._unread[stream] += len(data)
        if stream in self._lost or not data:
            return
        # One queue for both streams: what is printed to both keeps its order.
        self._waiting.append((stream, memoryview(data)))
        if len(self._waiting) == 1:
            self.drain()

    def say(self, text: str) -> None:
        """Writes a message of our own."""
        self.write(2, f"mlaunch: {text}\n".encode(errors="backslashreplace"))

    @property
    def blocked(self) -> int | None:
        """The descriptor that must take more before ``drain`` can go on; None if nothing waits."""
        return self._outlets[self._waiting[0][0]].fd if self._waiting else None

    def drain(self) -> bool:
        """Writes what can be written without waiting; True if nothing is left."""
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
        """Waits until all is written; after ``until``, in monotonic seconds, only for who still reads."""
        while not self.drain():
            self.raise_interrupt()  # before it waits once more; what is not written yet stays
            patience = max(until - time.monotonic(), _READER_TIMEOUT)
            # Not a thread with a queue: one that hangs in a write at the interpreter's end holds the lock of the
            # stream.
            poll = select.poll()
            poll.register(self.blocked or 0, select.POLLOUT)
            with interrupts.allowed():
                ready = poll.poll(None if math.isinf(patience) else patience * 1000)
            if not ready:
                self._leave_unread(self._waiting[0][0])
        self.raise_interrupt()

    def finish(self, until: float = math.inf) -> None:
        """Waits as ``wait``, after the last that is written, and says how much of it nobody has read."""
        self.wait(until)
        size = self._unread.pop(1, 0)
        if size:
            self.say(f"nobody reads stdout; the last {size} bytes of what ranks printed there are not shown")
            self.wait(until)

    def raise_interrupt(self) -> None:
        """Raises what came while a stream object was busy: Ctrl-C, or what another handler raised."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Drops what waits."""
        self._waiting.clear()
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()

    def _try_write(self, stream: int, data: memoryview) -> int:
        """Returns how much need not be written any more."""
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
            if time.monotonic() - began > _READER_TIMEOUT:  # it waits, and would the next time, too
                self._lost.add(stream)
            elif not self._begun:  # it came in the flush before; a file can wait for the next turn
                return 0 if stream in self._outlets else self._try_write(stream, data)
        return len(data)

    def _write(self, stream: int, data: memoryview) -> int:
        """Returns how much was written; 0 if none can be without waiting."""
        # Of this moment: a test captures, and a notebook changes them from cell to cell.
        target: Any = sys.stdout if stream == 1 else sys.stderr
        fd, self._begun = descriptor(target), False
        if fd is not None:
            return self._outlet(stream, fd).write(data, target.flush)
        if stream in self._outlets:
            self._outlets.pop(stream).close()
        with interrupts.allowed():  # user code, maybe
            if isinstance(target, io.TextIOWrapper):
                target.flush()
                self._begun = True
                target.buffer.write(data)
            else:  # a notebook's; one that copies what it is given
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
