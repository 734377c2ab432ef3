"""Carries what ranks print from their pipes to files and to the console, while the launcher waits for them.

A rank that prints faster than it is read waits in its pipe, as it would on a slow terminal; nothing but a line per
stream is held in memory. What a rank has printed is read to its end after its death.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlaunch.caller.output.console import Console
from mlaunch.caller.output.display import Area, Display
from mlaunch.caller.output.files import LogFile
from mlaunch.caller.output.lines import Splitter
from mlaunch.caller.output.merging import Merger

_READ = 65536  # bytes: a pipe holds no more
_FLOOD = 32768  # bytes at once: such a rank's lines are not compared with the others'
STREAMS = (1, 2)


@dataclass(frozen=True)
class Policy:
    """What becomes of one stream of one rank."""

    shown: bool = True
    kept: bool = False  # in a file


@dataclass(frozen=True)
class Plan:
    """What becomes of the output of a launch on this machine.

    ``policies``: by (local rank, stream); a stream that has none is the rank's own, not ours to carry. ``prefix``: of
    the ranks that printed a line. ``merge``: equal lines are shown once.
    """

    policies: dict[tuple[int, int], Policy]
    prefix: Callable[[Sequence[int]], str]
    directory: str | None = None
    by_local_rank: bool = False  # the directories of its files are named by
    merge: bool = True
    area: Area | None = None  # for lines that change

    def carried(self, local_rank: int) -> tuple[int, ...]:
        """The streams of a rank that are ours to carry."""
        return tuple(stream for stream in STREAMS if (local_rank, stream) in self.policies)

    def piped(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The same of all ranks; () where nothing is carried."""
        return tuple(self.carried(local_rank) for local_rank in range(size)) if self.policies else ()


@dataclass
class _Stream:
    rank: int
    number: int
    policy: Policy
    splitter: Splitter
    file: LogFile | None


class Relay:
    """``size``: ranks of this machine. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        plan: Plan,
        size: int,
        attempt: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._size = size
        self._attempt = attempt
        self._clock = clock
        self._console = Console()
        self._merger = Merger(size) if plan.merge and size > 1 else None
        self._streams: dict[int, _Stream] = {}  # by file descriptor
        self._poll = select.poll()
        self._display = Display(plan.area, clock())
        self.status: Callable[[], list[str]] = list  # the lines above the bars

    @property
    def directory(self) -> str | None:
        """Where it keeps files; None if it keeps none."""
        return self._plan.directory

    def adopt(self, rank: int, local_rank: int, fds: Sequence[int]) -> None:
        """The reading ends of a rank's pipes, in the order of ``Plan.carried``."""
        for fd, number in zip(fds, self._plan.carried(local_rank), strict=True):
            os.set_blocking(fd, False)
            policy = self._plan.policies[local_rank, number]
            file = None
            if policy.kept and self._plan.directory is not None:
                name = local_rank if self._plan.by_local_rank else rank
                file = LogFile(self._plan.directory, self._attempt, name, number, self.say)
            self._streams[fd] = _Stream(rank, number, policy, Splitter(), file)
            self._poll.register(fd, select.POLLIN)

    def carry_until(self, fd: int) -> None:
        """Carries until another descriptor can be read."""
        self._poll.register(fd, select.POLLIN)
        try:
            ready: set[int] = set()
            while fd not in ready:
                ready = {found for found, _ in self._poll.poll(self._patience())}
                for readable in ready - {fd}:
                    self._read(readable)
                self._show_waiting()
                self._draw()
        finally:
            self._poll.unregister(fd)

    def finish(self) -> None:
        """Every process of the launch is gone: carries what they left."""
        for fd in list(self._streams):
            while fd in self._streams and self._read(fd):
                pass
            if fd in self._streams:  # somebody who outlived the launch holds the other end
                self._close(fd)
        self._show_waiting(everything=True)
        self._display.close(self.status())

    def close(self) -> None:
        """Lets go of what ``finish`` did not come to."""
        self._display.close([])
        for fd in list(self._streams):
            self._close(fd)

    def _patience(self) -> float | None:
        """Milliseconds until a line need wait no longer, or those that change are due."""
        steps = (self._merger.due if self._merger is not None else None, self._display.due)
        due = [step for step in steps if step is not None]
        return max(0.0, min(due) - self._clock()) * 1000 if due else None

    def _draw(self) -> None:
        now = self._clock()
        if self._display.due is not None and now >= self._display.due:
            bars = [
                f"{self._plan.prefix([stream.rank])}{stream.splitter.bar.decode(errors='replace')}"
                for stream in self._streams.values()
                if stream.policy.shown and stream.splitter.bar
            ]
            self._display.draw([*self.status(), *bars], now)

    def say(self, text: str) -> None:
        """A message of our own."""
        self._display.make_room()
        self._console.say(text)

    def _print(self, stream: int, data: bytes) -> None:
        self._display.make_room()
        self._console.write(stream, data)

    def _read(self, fd: int) -> bool:
        """False if nothing has come."""
        stream = self._streams[fd]
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        if not data:
            self._close(fd)
            return False
        if stream.file is not None:
            stream.file.write(data)
        if stream.policy.shown:
            self._take(stream, stream.splitter.feed(data), flood=len(data) >= _FLOOD)
        return True

    def _close(self, fd: int) -> None:
        stream = self._streams.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        if stream.policy.shown:
            self._take(stream, stream.splitter.end())
        if stream.file is not None:
            stream.file.close()

    def _take(self, stream: _Stream, lines: Sequence[bytes], *, flood: bool = False) -> None:
        if self._merger is not None and not flood:
            now = self._clock()
            for line in lines:
                self._merger.add(stream.rank, stream.number, line, now)
        elif lines:
            self._show_waiting(everything=True)
            prefix = self._plan.prefix([stream.rank]).encode()
            self._print(stream.number, b"".join(prefix + line + b"\n" for line in lines))

    def _show_waiting(self, *, everything: bool = False) -> None:
        if self._merger is None:
            return
        for line in self._merger.take(self._clock(), everything=everything):
            self._print(line.stream, self._plan.prefix(line.ranks).encode() + line.text + b"\n")
