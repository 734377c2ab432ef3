"""Output of ranks on other machines, on its way into pipes that are read like those of ranks on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from mlaunch.base.fds import ready

# Above it machines and their ranks wait, as a rank here waits at a full pipe.
_LIMIT = 1 << 22  # bytes


@dataclass
class _Pipe:
    fd: int  # the writing end
    waiting: bytearray = field(default_factory=bytearray)
    written: int = 0  # bytes
    dropped: int = 0  # bytes, since it last took some
    ended: bool = False  # nothing more comes


class Backlog:
    """The pipes by rank and stream. ``limit``: bytes that may wait in all pipes before ``full``; None: no limit.

    Without a limit no machine waits, and output above 4 MiB is dropped: a line in its place says how many bytes.
    """

    def __init__(self) -> None:
        self.limit: int | None = _LIMIT
        self._pipes: dict[tuple[int, int], _Pipe] = {}

    @property
    def full(self) -> bool:
        """True if machines must wait until more output was read."""
        return self.limit is not None and self._holds_more_than(self.limit)

    def _holds_more_than(self, size: int) -> bool:
        return sum(len(pipe.waiting) for pipe in self._pipes.values()) > size

    def open(self, rank: int, streams: Iterable[int]) -> list[int]:
        """Make pipes for a rank's streams. Return their reading ends, which the receiver owns."""
        readers = []
        for stream in streams:
            reader, writer = os.pipe()
            # The thread must listen to machines even if nobody reads the output.
            os.set_blocking(writer, False)
            self._pipes[rank, stream] = _Pipe(writer)
            readers.append(reader)
        return readers

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Add output of a rank; b"": it will print no more."""
        pipe = self._pipes.get((rank, stream))
        if pipe is None:  # nobody reads it any more
            return
        if data and self.limit is None and self._holds_more_than(_LIMIT):
            pipe.dropped += len(data)
            return
        if pipe.dropped:
            pipe.waiting += f"\nmlaunch: {pipe.dropped} bytes that were printed here are lost: nobody read\n".encode()
            pipe.dropped = 0
        pipe.waiting += data
        pipe.ended = not data
        self._write(rank, stream)

    def end(self, ranks: Collection[int]) -> None:
        """Note that these ranks will print no more."""
        for rank, stream in list(self._pipes):
            if rank in ranks:
                self.add(rank, stream, b"")

    def wait(self, other: int) -> bool:
        """Wait until a pipe takes more, or ``other`` can be read; True if it can."""
        return other in ready([other], self.blocked(), None)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return for each pipe the position at which its output ends now."""
        return {key: pipe.written + len(pipe.waiting) for key, pipe in self._pipes.items()}

    def is_past(self, ends: Mapping[tuple[int, int], int]) -> bool:
        """True if all pipes have taken the output up to these positions."""
        return all(self._pipes[key].written >= end for key, end in ends.items() if key in self._pipes)

    def blocked(self) -> list[int]:
        """Return the descriptors that must become writable before ``flush`` can write more."""
        return [pipe.fd for pipe in self._pipes.values() if pipe.waiting]

    def flush(self) -> None:
        """Write what can be written without waiting."""
        for rank, stream in list(self._pipes):
            self._write(rank, stream)

    def _write(self, rank: int, stream: int) -> None:
        pipe = self._pipes[rank, stream]
        with contextlib.suppress(BlockingIOError):
            try:
                while pipe.waiting:
                    size = os.write(pipe.fd, pipe.waiting)
                    pipe.written += size
                    del pipe.waiting[:size]
            except BrokenPipeError:
                pipe.waiting.clear()
                pipe.ended = True
        if pipe.ended and not pipe.waiting:
            os.close(self._pipes.pop((rank, stream)).fd)

    def see_out(self, ranks: Collection[int], other: int, hear: Callable[[], bool]) -> None:
        """Write the ranks' last output, which its reader reads to the end, and close.

        ``hear``: reads what comes at ``other``; False: nobody reads the output any more.
        """
        # After the launch's last record: a longer wait before that would delay errors behind a slow reader. 300 MB of
        # four ranks arrived whole over ssh, mpirun and Slurm, at a reader that took two minutes for them.
        self.end(ranks)
        goes_on = True
        while goes_on and self.blocked():
            if self.wait(other):
                goes_on = hear()
            self.flush()
        self.close()

    def close(self) -> None:
        """Close all pipes, and drop output that was not read."""
        for pipe in self._pipes.values():
            os.close(pipe.fd)
        self._pipes.clear()
