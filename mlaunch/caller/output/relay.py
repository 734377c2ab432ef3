"""The way of ranks' output from their pipes to the output of their call, while the caller waits for them.

A rank that prints faster than its pipe is read waits, as on a slow terminal; only a line per stream is held in memory.
After a rank's death, its pipes are read to their ends.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import math
import os
import select
import termios
import time
from collections.abc import Callable, Sequence

from mlaunch.base.fds import KeptEpoll, KeptFd
from mlaunch.caller import interrupts
from mlaunch.caller.output.call_output import CallOutput, RankStream
from mlaunch.caller.output.console import harmless
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.protocol.board import Board

Events = list[tuple[int, int]]  # (descriptor, events of epoll)
_READ = 65536  # bytes: a pipe holds no more
_COUNTS = 5


class Relay:
    """The pipes of a launch's ranks. ``size``: ranks of this machine; ``clock`` gives monotonic seconds.

    ``ends_come``: only a thread of this process holds the other ends, and more than a pipe holds may come; so
    ``finish`` reads until all have been closed.
    """

    def __init__(
        self,
        plan: OutputPlan,
        size: int,
        attempt: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        ends_come: bool = False,
    ) -> None:
        self._clock = clock
        self._ends_come = ends_come
        self.output = CallOutput(plan, size, attempt, clock)
        self._status: Callable[[], list[str]] = list
        self._streams: dict[int, RankStream] = {}  # by file descriptor
        self._watched: set[int] = set()
        self._awaited: int | None = None  # stdout or stderr while its reader is slow; ranks wait as long
        self._kept = KeptEpoll()
        self._poll = self._kept.poll
        self._pipes: dict[int, KeptFd] = {}  # by file descriptor, as the streams

    def intact(self) -> bool:
        """True if the number that ``fileno`` returns is still our epoll's: other code may have closed it."""
        watched = list(self._watched)
        if watched and not any(self._kept.watches(fd, select.EPOLLIN) for fd in watched) and self._watched:
            self._kept.forget()  # other code's epoll
        return self._kept.intact()

    def _watches(self, fd: int) -> bool:
        """True if a watched descriptor is still the same, or if that can no longer be found out."""
        if self._kept.watches(fd, select.EPOLLIN):
            return True
        return not self.intact() or fd not in self._watched  # another thread may have ceased to watch it

    def surely_watches(self, *fds: int) -> bool:
        """True if these are watched, and they and its own descriptor are what they were.

        The kernel finds what is watched by both, so neither need be asked for itself.
        """
        for fd in fds:  # noqa: SIM110 - each short call comes here twice
            if fd not in self._watched or not self._kept.watches(fd, select.EPOLLIN):
                return False
        return True

    def fileno(self) -> int:
        """Return a descriptor that can be read when ``carry`` has something to do."""
        return self._poll.fileno()

    def watch(self, fd: int) -> Callable[[], bool]:
        """Watch another descriptor for ``carry``. Return a check that is True while it is still the same file."""
        self._poll.register(fd, select.EPOLLIN)
        self._watched.add(fd)
        return functools.partial(self._watches, fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""
        self._watched.discard(fd)
        with contextlib.suppress(OSError):  # it was closed
            self._poll.unregister(fd)

    def adopt(self, rank: int, local_rank: int, fds: Sequence[int], board: Board | None = None) -> None:
        """Take over the reading ends of a rank's pipes, in the order of ``OutputPlan.carried``."""
        for fd, number in zip(fds, self.output.plan.carried(local_rank), strict=True):
            os.set_blocking(fd, False)  # the caller supervises, too: it waits in its poll alone
            self._pipes[fd] = KeptFd(fd)
            self._streams[fd] = stream = self.output.open_stream(rank, local_rank, number, board)
            if self._is_read(stream):
                self._poll.register(fd, select.EPOLLIN)

    def timeout(self) -> float | None:
        """Return the seconds until ``carry`` is due though nothing can be read; None: it is not."""
        due = self.output.due()
        return None if due is None else max(0.0, due - self._clock())

    def wait(self, timeout: float | None = None) -> Events:
        """Wait until something can be read, and return it unread. ``timeout`` in seconds; None: no limit.

        Return nothing, too, if other code has closed what this waits for.
        """
        try:
            return self._poll.poll(timeout)
        except (OSError, ValueError) as error:
            if interrupts.by_handler(error):
                raise
            return []

    def carry(self, readable: Events | None = None) -> set[int]:
        """Carry what has come, without waiting; return the watched descriptors that can be read.

        ``readable``: what ``wait`` has just returned, if it was called.
        """
        readable = readable or self._poll.poll(0)  # raises if other code has closed it
        ready = {fd for fd, _ in readable}
        if self._awaited in ready and self.output.console.drain():
            self._await(None)
        for fd, event in readable:
            if event == select.EPOLLHUP and fd in self._streams:  # nothing is in it, so no line can be out of order
                self._close(fd)
        if read := ready & self._streams.keys():
            self._read_round(read)
        self.output.show_due()
        if not self.output.untouched:  # most calls print nothing
            self._await(self.output.console.blocked)
            self.output.console.raise_interrupt()
        return ready & self._watched

    def show_status(self, status: Callable[[], list[str]]) -> None:
        """Show these lines above the bars, of each call's output."""
        self._status = self.output.status = status

    def finish(self, until: float = math.inf, *, stays: bool = False) -> None:
        """Carry the last output of ranks that are gone; after ``until``, no longer wait for a reader.

        ``stays``: the ranks stay: carry what they have printed until now.
        """
        if not self.output.untouched:
            self._wait_for_reader(until)
            self._await(None)
        if stays:
            self._read_round({fd for fd, _ in self._poll.poll(0)} & self._streams.keys())
            for stream in self._streams.values() if not self.output.untouched else ():
                self.output.end_stream(stream)
        else:
            while self._streams and (self._read_round(set(self._streams)) or (self._ends_come and self._more_comes())):
                self.output.show_lines()
                self._wait_for_reader(until)
            for fd in list(self._streams):  # a process that outlived the launch holds the other end
                self._close(fd)
        if not self.output.untouched:
            self.output.finish()
            with harmless():
                self.output.console.finish(until)

    def _wait_for_reader(self, until: float) -> None:
        with harmless():
            self.output.console.wait(until)

    def _more_comes(self) -> bool:
        """Wait for more output, or an end, as all ends come; False if there is nothing to wait for."""
        return bool(self._streams) and bool(interrupts.wait_readable(list(self._streams), None))

    def turn_to(self, plan: OutputPlan, size: int, board: Board | None) -> None:
        """Begin another call's output."""
        self._await(None)
        if self.output.serve(plan):
            return
        self.output.close()
        self.output = CallOutput(plan, size, 0, self._clock)
        self.output.status = self._status
        for fd, was in self._streams.items():
            stream = self._streams[fd] = self.output.open_stream(was.rank, was.local_rank, was.number, board)
            stream.times, stream.displays = was.times, was.displays  # it is the same rank

    def close(self) -> None:
        """Drop what ``finish`` has not carried (after an error)."""
        self.output.close()
        for fd in list(self._streams):
            self._close(fd)
        self._kept.close()

    def _is_read(self, stream: RankStream) -> bool:
        """True if its pipe is read now: while the reader of its lines is slow, the rank waits."""
        return self._awaited is None or not stream.policy.shown

    def _readable(self) -> list[int]:
        return [fd for fd, stream in self._streams.items() if self._is_read(stream)]

    def _await(self, fd: int | None) -> None:
        """Poll a descriptor until it takes more, and not the ranks that wait for it; None: poll all ranks."""
        if fd == self._awaited:
            return
        before = set(self._readable())
        if self._awaited is not None:
            with contextlib.suppress(OSError):  # it was closed
                self._poll.unregister(self._awaited)
        self._awaited = fd
        if fd is not None:
            self._poll.register(fd, select.EPOLLOUT)
        after = set(self._readable())
        with contextlib.suppress(OSError):  # they were closed
            for pipe in before - after:
                self._poll.unregister(pipe)
            for pipe in after - before:
                self._poll.register(pipe, select.EPOLLIN)

    def _read_round(self, ready: set[int]) -> bool:
        """Read what all pipes had at one moment, if one is ready; False if nothing had come.

        Ranks print, meet and print: a later line in a pipe that is read last may follow one that comes into a pipe that
        was read before.
        """
        if ready:
            self._drop_foreign()
        # With 2 to 4 ranks beside 2 busy loops on 2 cores, 61 of 80 launches showed a line of a later step before one
        # of an earlier step without this, and 0 of 80 with it.
        sizes = self._sizes() if ready else {}
        found = [self._read(fd, min(size, _READ) or 1) for fd, size in sizes.items() if size or fd in ready]
        return any(found)

    def _drop_foreign(self) -> None:
        """End streams whose pipes other code has closed: they would read from its files."""
        for fd in [fd for fd, pipe in self._pipes.items() if not pipe.intact()]:
            self._close(fd)

    def _sizes(self) -> dict[int, int]:
        """Return how many bytes waited in each pipe at one moment.

        It is a moment between two equal counts. For ranks that print all the time, it gives up after a few.
        """
        before: dict[int, int] = {}
        for _ in range(_COUNTS):
            sizes = {fd: _size(fd) for fd in self._readable()}
            if sizes == before:
                break
            before = sizes
        return sizes

    def _read(self, fd: int, most: int) -> bool:
        """Read from one pipe; False if nothing has come."""
        try:
            data = os.read(fd, most)
        except BlockingIOError:
            return False
        if not data:
            self._close(fd)
            return False
        self.output.take(self._streams[fd], data)
        return True

    def _close(self, fd: int) -> None:
        stream = self._streams.pop(fd)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        self._pipes.pop(fd).close()
        self.output.end_stream(stream)


def _size(fd: int) -> int:
    """Return how many bytes wait in a pipe."""
    size = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return size[0]
