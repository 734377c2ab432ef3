"""Shared memory in which the ranks of a test see who is done. Not a collective: some may wait in one."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator

from mlaunch.base.fds import fix_size, memory_file
from mlaunch.protocol import this_rank
from mlaunch.pytest.wire.rank_tests import Beginning, Verdict

_PATIENCE = 0.02  # seconds for the others to begin to run, after one has not passed
_MOST_PATIENCE = 2.0  # for ranks that run, as the machine may be busy
_PAUSE = 0.001
# The number of the test that the rank has left last, its pid, how many parts it has left (the test's number is in the
# upper half), and its last two failures in parts, each with its outcome: a rank may continue before others have looked.
_CELL = struct.Struct("=qqqqqqq")
_READS = 3  # one may come in the middle of a write
_PARTS = 2**32
_LENGTH = struct.Struct("=q")


class RankBarrier:
    """The board, with the number of the test whose function each rank has left last, and the log of verdicts."""

    def __init__(self, beginning: Beginning) -> None:
        self._size = beginning.size
        here = this_rank.this_rank
        self._rank = 0 if here is None else here.rank
        fd = os.open(beginning.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = mmap.mmap(fd, _CELL.size * self._size)
        finally:
            os.close(fd)
        # O_APPEND: the kernel puts each write at the end, so verdicts of several ranks do not overwrite each other.
        self._log = os.open(beginning.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._part, self._failures = 0, (0, 0, 0, 0)
        self.leave(0)

    def leave(self, number: int) -> None:
        """Note that this rank has left the test's function."""
        # Shared memory: a rank may leave its test while no thread of it can send anything.
        self._left = number
        self._write()

    def _write(self) -> None:
        _CELL.pack_into(self._board, _CELL.size * self._rank, self._left, os.getpid(), self._part, *self._failures)

    def leave_part(self, number: int, part: int, outcome: int = 0) -> None:
        """Note that this rank has left a part of a test. ``outcome``: 0, or a number for this kind of failure."""
        self._part = number * _PARTS + part
        if outcome:
            self._failures = (*self._failures[2:], self._part, outcome)
        self._write()

    def all_left_part(self, number: int, part: int) -> bool:
        """True if all ranks have left a part, or leave it soon."""
        wanted = number * _PARTS + part
        return self._wait(lambda left, at: left < number and at < wanted)

    def all_failed(self, number: int, part: int, outcome: int) -> bool:
        """True if all ranks have left exactly this part with this outcome, or do so soon."""
        wanted = number * _PARTS + part, outcome
        if not self.all_left_part(number, part):
            return False
        return any(all(wanted in (at[3:5], at[5:]) for at in self._cells()) for _ in range(_READS))

    def finish(self, number: int, verdict: Verdict) -> bool:
        """True if the test has passed here, or all ranks have left it, too; else write the verdict to the log."""
        if verdict.outcome == "passed" or self._wait(lambda left, _: left < number):
            return True
        write(self._log, self._rank, verdict)
        return False

    def _cells(self) -> Iterator[tuple[int, ...]]:
        return _CELL.iter_unpack(self._board[:])

    def _wait(self, is_missing: Callable[[int, int], bool]) -> bool:
        begun = ran = time.monotonic()
        while missing := [pid for left, pid, at, *_ in self._cells() if is_missing(left, at)]:
            # A rank that runs may come to its end; one that sleeps for 20 ms waits for this one in a collective.
            now = time.monotonic()
            ran = now if any(map(_runs, missing)) else ran
            if now - begun > _MOST_PATIENCE or now - ran > _PATIENCE:
                return False
            time.sleep(_PAUSE)
        return True


def _runs(pid: int) -> bool:
    """True if a thread of a process runs, or would if a core were free: autograd has threads of its own."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"R":
                    return True
    return False


def new_files(size: int) -> tuple[int, int]:
    """Make the board and the log, in memory; return their descriptors."""
    board = memory_file("board")
    os.ftruncate(board, _CELL.size * size)
    fix_size(board)
    return board, os.memfd_create("mlaunch-log", os.MFD_CLOEXEC)


def write(log: int, rank: int, verdict: Verdict) -> None:
    """Append a verdict, in one piece."""
    data = pickle.dumps((rank, verdict))
    os.write(log, _LENGTH.pack(len(data)) + data)


def take(log: int) -> dict[int, Verdict]:
    """Return the verdicts by rank, and empty the log."""
    data, found = os.pread(log, os.fstat(log).st_size, 0), {}
    os.ftruncate(log, 0)
    while data:
        (length,) = _LENGTH.unpack_from(data)
        rank, verdict = pickle.loads(data[_LENGTH.size : _LENGTH.size + length])
        found[rank] = verdict
        data = data[_LENGTH.size + length :]
    return found
