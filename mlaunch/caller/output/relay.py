"""Carries what ranks print from their pipes to the output of their call, while the caller waits for them.

A rank that prints faster than it is read waits in its pipe, as it would on a slow terminal; nothing but a line per
stream is held in memory. What a rank has printed is read to its end after its death.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence

from mlaunch.caller.output.call_output import CallOutput, Stream
from mlaunch.caller.output.plan import OutputPlan

_READ = 65536  # bytes: a pipe holds no more


class Relay:
    """The pipes of a launch's ranks. ``size``: ranks of this machine; ``clock`` gives monotonic seconds."""

    def __init__(self, plan: OutputPlan, size: int, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.output = CallOutput(plan, size, attempt, clock)
        self._streams: dict[int, Stream] = {}  # by file descriptor
        self._watched: set[int] = set()
        self._poll = select.epoll()

    def fileno(self) -> int:
        """Returns a descriptor that can be read when ``carry`` has something to do."""
        return self._poll.fileno()

    def watch(self, fd: int) -> None:
        """Has ``carry`` tell when another descriptor can be read."""
        self._watched.add(fd)
        self._poll.register(fd, select.EPOLLIN)

    def adopt(self, rank: int, local_rank: int, fds: Sequence[int]) -> None:
        """Takes over the reading ends of a rank's pipes, in the order of ``OutputPlan.carried``."""
        for fd, number in zip(fds, self.output.plan.carried(local_rank), strict=True):
            os.set_blocking(fd, False)
            self._streams[fd] = self.output.open_stream(rank, local_rank, number)
            self._poll.register(fd, select.EPOLLIN)

    def timeout(self) -> float | None:
        """Returns the seconds until ``carry`` is due though nothing can be read; None: it is not."""
        due = self.output.due()
        return None if due is None else max(0.0, due - self._clock())

    def carry(self) -> set[int]:
        """Carries what has come, without waiting; returns the watched descriptors that can be read."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        for fd in ready - self._watched:
            self._read(fd)
        self.output.show_due()
        return ready & self._watched

    def finish(self) -> None:
        """Carries what ranks left that are all gone."""
        for fd in list(self._streams):
            while fd in self._streams and self._read(fd):
                pass
            if fd in self._streams:  # somebody who outlived the launch holds the other end
                self._close(fd)
        self.output.finish()

    def close(self) -> None:
        """Lets go of what ``finish`` did not come to."""
        self.output.close()
        for fd in list(self._streams):
            self._close(fd)
        self._poll.close()

    def _read(self, fd: int) -> bool:
        """Reads from one pipe; False if nothing has come."""
        try:
            data = os.read(fd, _READ)
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
        os.close(fd)
        self.output.end_stream(stream)
