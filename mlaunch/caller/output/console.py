"""The streams on which people see the output of ranks, and the lines that change there while a launch runs.

They are this process's present ``sys.stdout`` and ``sys.stderr``. So output arrives in the running cell of a notebook,
and in the capture of a test. Until the launch is over, nothing here waits for the reader of a pipe or terminal: what it
does not take now is kept in order.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mlaunch.base.fds import renewed
from mlaunch.base.frames import is_ours
from mlaunch.base.log import log
from mlaunch.caller import interrupts
from mlaunch.caller.report import notebook
from mlaunch.core import load

_READER_TIMEOUT = 2.0  # seconds in which nobody reads, after which nobody will
_LEAST = select.PIPE_BUF  # bytes: so many go at once into a pipe that takes any, unless others write to it, too
_MOST = 1 << 20
SILENCE = 2.0  # seconds of a wait that the log does not mention
_told: set[str] = set()  # places of errors


class harmless:
    """A block that shows output or status: an error there must not cost a call its values.

    Errors are reported, once for each place, and not raised; except those of signal handlers.
    Not a contextlib context manager; see ``interrupts``.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or interrupts.by_handler(error):
            return False
        place = _place(trace)
        if place not in _told:
            _told.add(place)
            log.warning(
                "could not show what ranks do or print, and left it out: %s: %s (%s). The call continues and loses no "
                "value. Please report this; the traceback is logged at level DEBUG",
                type(error).__name__, error, place,
            )  # fmt: skip
        log.debug("could not show what ranks do or print", exc_info=error)
        return True


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of this package, "display.py:12"."""
    place = ""
    while trace is not None:
        if is_ours(trace.tb_frame.f_code.co_filename) or not place:
            place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


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
            if not interrupts.wait(self._wait_for_reader, patience):
                self._leave_unread(self._waiting[0][0])
        self.raise_interrupt()

    def _wait_for_reader(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self.blocked or 0, select.POLLOUT)
        return bool(poll.poll(timeout * 1000))

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


# Lines that change in place: none without a terminal, a notebook or ``mlaunch/display``


class LiveLines:
    """The changing lines of one launch: none. Write what the methods return to stderr, under ``lock``."""

    # Of all launches: two that draw at once would move each other's cursor.
    lock = renewed(threading.RLock())
    holder: Any = None  # the lines that are drawn now, of any launch
    due: float | None = None  # the time to draw them again

    def draw(self, lines: list[str], now: float) -> str:  # noqa: ARG002
        """Show these lines in place of the last ones."""
        return ""

    def postpone(self, now: float) -> None:
        """Draw later."""

    def make_room(self) -> str:
        """Make room for output, whichever launch draws lines now."""
        with harmless():
            return str(LiveLines.holder.hide()) if LiveLines.holder is not None else ""
        LiveLines.holder = None
        self.give_up()
        return ""

    def close(self, lines: list[str]) -> str:  # noqa: ARG002
        """Draw the final state of these lines."""
        return ""

    def give_up(self) -> None:
        """Draw nothing more."""


class LivePlace:
    """A place for changing lines, which a feature draws."""

    def lines(self, start: float) -> LiveLines:
        """Begin the lines of a launch. ``start``: when it began, on the caller's clock."""
        raise NotImplementedError


def live_place(*, blocks: bool = True) -> LivePlace | None:
    """Return this process's place for changing lines; None if it has none.

    ``blocks``: the call waits for its ranks. Otherwise its lines would be drawn over the prompt of a terminal.
    """
    has_terminal = False
    with contextlib.suppress(AttributeError, ValueError):  # None, closed
        has_terminal = sys.stderr.isatty()
    if not has_terminal and not notebook.is_here():
        return None
    drawing = load.at_hand("display", "caller")
    found: LivePlace | None = None if drawing is None else drawing.area(blocks=blocks)
    return found


class StartingLine:
    """A line before there is a launch to show: while torch is imported, or devices are waited for.

    Once shown, it stays until the block ends. ``place``: the place for changing lines; None: there is none.

    Not a contextlib context manager; see ``interrupts``.
    """

    def __init__(self, name: str, place: LivePlace | None) -> None:
        self._name = name
        self._lines = None if place is None else place.lines(time.monotonic())
        self._shown = self._logged = False
        # Before a wait is mentioned: waiting for the end of the previous call is short, and no news for a log.
        self.silence = SILENCE if place is None else 0.0

    def show(self) -> None:
        """Show that the call has begun, and waits for the import of torch."""
        self.tell(f"{self._name}  starting: importing torch")

    def tell_wait(self, text: str) -> None:
        """Show what the call waits for, maybe for hours; without changing lines, once in the log."""
        if self._lines is not None:
            self.tell(text)
        elif not self._logged:
            self._logged = True
            log.warning("%s", text)

    def tell(self, text: str) -> None:
        """Show a text in the line's place."""
        if self._lines is not None:
            with LiveLines.lock:
                self._shown = True
                _write(self._lines.draw([text], time.monotonic()))

    def __enter__(self) -> StartingLine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._lines is not None and self._shown:
            with LiveLines.lock:
                _write(self._lines.close([f"{self._name}  failed"] if kind is not None else []))


def _write(text: str) -> None:
    console = Console()
    console.write(2, text.encode())
    console.close()
