"""Carries what ranks print from their pipes to the output of their call, while the caller waits for them.

A rank that prints faster than it is read waits in its pipe, as it would on a slow terminal; nothing but a line per
stream is held in memory. What a rank has printed is read to its end after its death.
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
from mlaunch.caller.output.harmless import harmless
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.protocol.board import Board

Events = list[tuple[int, int]]  # a descriptor, and what of it, as an epoll says it
_READ = 65536  # bytes: a pipe holds no more
_LOOKS = 5


class Relay:
    """The pipes of a launch's ranks. ``size``: ranks of this machine; ``clock`` gives monotonic seconds.

    ``ends_come``: a thread of this process alone holds the other ends, and more may come by them than a pipe holds; so
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
        self._awaited: int | None = None  # what people read, while they do not read it; ranks wait as long
        self._kept = KeptEpoll()
        self._poll = self._kept.poll
        self._pipes: dict[int, KeptFd] = {}  # by file descriptor, as the streams

    def intact(self) -> bool:
        """Tells whether the descriptor that ``fileno`` returns is still its own: others may have closed it."""
        watched = list(self._watched)
        if watched and not any(self._kept.watches(fd, select.EPOLLIN) for fd in watched) and self._watched:
            self._kept.forget()  # a stranger's epoll
        return self._kept.intact()

    def _watches(self, fd: int) -> bool:
        """Tells whether a watched descriptor is what it was; True as well if that cannot be asked any more."""
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
        """Returns a descriptor that can be read when ``carry`` has something to do."""
        return self._poll.fileno()

    def watch(self, fd: int) -> Callable[[], bool]:
        """Lets ``carry`` tell when another descriptor can be read; returns what asks whether that is still the same."""
        self._poll.register(fd, select.EPOLLIN)
        self._watched.add(fd)
        return functools.partial(self._watches, fd)

    def unwatch(self, fd: int) -> None:
        """Stops watching a descriptor."""
        self._watched.discard(fd)
        with contextlib.suppress(OSError):  # it was closed
            self._poll.unregister(fd)

    def adopt(self, rank: int, local_rank: int, fds: Sequence[int], board: Board | None = None) -> None:
        """Takes over the reading ends of a rank's pipes, in the order of ``OutputPlan.carried``."""
        for fd, number in zip(fds, self.output.plan.carried(local_rank), strict=True):
            os.set_blocking(fd, False)  # the caller supervises, too: it waits in its poll alone
            self._pipes[fd] = KeptFd(fd)
            self._streams[fd] = stream = self.output.open_stream(rank, local_rank, number, board)
            if self._is_read(stream):
                self._poll.register(fd, select.EPOLLIN)

    def timeout(self) -> float | None:
        """Returns the seconds until ``carry`` is due though nothing can be read; None: it is not."""
        due = self.output.due()
        return None if due is None else max(0.0, due - self._clock())

    def wait(self, timeout: float | None = None) -> Events:
        """Waits until something can be read, carrying nothing; returns what. ``timeout`` in seconds, None: none.

        Returns nothing, too, if other code has closed what this waits for.
        """
        try:
            return self._poll.poll(timeout)
        except (OSError, ValueError) as error:
            if interrupts.by_handler(error):
                raise
            return []

    def carry(self, readable: Events | None = None) -> set[int]:
        """Carries what has come, without waiting; returns the watched descriptors that can be read.

        ``readable``: what ``wait`` has just returned; it is asked for otherwise.
        """
        readable = readable or self._poll.poll(0)  # of those who have closed it, that tells the error
        ready = {fd for fd, _ in readable}
        if self._awaited in ready and self.output.console.drain():
            self._await(None)
        for fd, event in readable:
            if event == select.EPOLLHUP and fd in self._streams:  # nothing is in it, so no line can be out of order
                self._close(fd)
        if read := ready & self._streams.keys():
            self._read_round(read)
        self.output.show_due()
        self._await(self.output.console.blocked)
        self.output.console.raise_interrupt()
        return ready & self._watched

    def show_status(self, status: Callable[[], list[str]]) -> None:
        """Shows these lines above the bars, of each call's output."""
        self._status = self.output.status = status

    def finish(self, until: float = math.inf, *, stays: bool = False) -> None:
        """Carries what ranks left that are all gone; after ``until`` no longer for people who do not read.

        ``stays``: they do, and what they have printed until now is carried.
        """
        if not self.output.untouched:
            self._wait_for_reader(until)
        self._await(None)
        if stays:
            self._read_round({fd for fd, _ in self._poll.poll(0)} & self._streams.keys())
            for stream in self._streams.values() if not self.output.untouched else ():
                self.output.end_stream(stream)
        else:
            while self._read_round(set(self._streams)) or self._more_comes():
                self.output.show_lines()
                self._wait_for_reader(until)
            for fd in list(self._streams):  # somebody who outlived the launch holds the other end
                self._close(fd)
        if not self.output.untouched:
            self.output.finish()
            with harmless():
                self.output.console.finish(until)

    def _wait_for_reader(self, until: float) -> None:
        with harmless():
            self.output.console.wait(until)

    def _more_comes(self) -> bool:
        """Waits for more, or an end, where all ends come; False if there is nothing to wait for."""
        return self._ends_come and bool(self._streams) and bool(interrupts.wait_readable(list(self._streams), None))

    def turn_to(self, plan: OutputPlan, size: int, board: Board | None) -> None:
        """Begins another call's output."""
        self._await(None)
        if self.output.serve(plan):
            return
        self.output.close()
        self.output = CallOutput(plan, size, 0, self._clock)
        self.output.status = self._status
        for fd, was in self._streams.items():
            stream = self._streams[fd] = self.output.open_stream(was.rank, was.local_rank, was.number, board)
            stream.times, stream.displays = was.times, was.displays  # the rank goes on, too

    def close(self) -> None:
        """Drops what ``finish`` did not come to (after an error)."""
        self.output.close()
        for fd in list(self._streams):
            self._close(fd)
        self._kept.close()

    def _is_read(self, stream: RankStream) -> bool:
        """Tells whether its pipe is read now: a rank whose lines people do not read must wait."""
        return self._awaited is None or not stream.policy.shown

    def _readable(self) -> list[int]:
        return [fd for fd, stream in self._streams.items() if self._is_read(stream)]

    def _await(self, fd: int | None) -> None:
        """Lets the poll tell when a descriptor takes more, not of the ranks that wait for that; None: of all ranks."""
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
        """Reads what had come at one moment from all pipes, if one is ready; False if nothing had.

        Of what came later there may be a line in a pipe that is read late, whose predecessor is in one that was read
        before: ranks print, meet and print.
        """
        if ready:
            self._drop_foreign()
        # With 2 to 4 ranks beside 2 busy loops on 2 cores, 61 of 80 launches showed a line of a later step before one
        # of an earlier step without this, and 0 of 80 with it.
        sizes = self._sizes() if ready else {}
        found = [self._read(fd, min(size, _READ) or 1) for fd, size in sizes.items() if size or fd in ready]
        return any(found)

    def _drop_foreign(self) -> None:
        """Ends streams whose pipes others have closed: they would read from a file of theirs."""
        for fd in [fd for fd, pipe in self._pipes.items() if not pipe.intact()]:
            self._close(fd)

    def _sizes(self) -> dict[int, int]:
        """Returns how many bytes waited in each pipe at one moment.

        It is between two looks that found the same. Ranks that print all the time get no more than a few looks.
        """
        before: dict[int, int] = {}
        for _ in range(_LOOKS):
            sizes = {fd: _size(fd) for fd in self._readable()}
            if sizes == before:
                break
            before = sizes
        return sizes

    def _read(self, fd: int, most: int) -> bool:
        """Reads from one pipe; False if nothing has come."""
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
    """Returns how many bytes wait in a pipe."""
    size = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return size[0]
