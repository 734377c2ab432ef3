"""Where the ranks of a test see of each other who is done, without a collective: some may wait in one."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time

from mlaunch.protocol import this_rank
from mlaunch.pytest.crossing import Beginning, Verdict

_PATIENCE = 0.05  # seconds for the others, once one has not passed
_PAUSE = 0.001
_CELL = struct.Struct("=q")
_LENGTH = struct.Struct("=q")


class Station:
    """The board, with the number of the test that each rank has done last, and the log of verdicts."""

    def __init__(self, beginning: Beginning) -> None:
        self._size = beginning.size
        here = this_rank.this_rank
        self._rank = 0 if here is None else here.rank
        fd = os.open(beginning.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = mmap.mmap(fd, _CELL.size * self._size)
        finally:
            os.close(fd)
        self._log = os.open(beginning.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def finish(self, number: int, verdict: Verdict) -> bool:
        """Says that this rank is done; False if its verdict went into the log, since others are not."""
        _CELL.pack_into(self._board, _CELL.size * self._rank, number)
        if verdict.outcome == "passed" or self._all_done(number):
            return True
        write(self._log, self._rank, verdict)
        return False

    def _all_done(self, number: int) -> bool:
        end = time.monotonic() + _PATIENCE
        while any(done < number for (done,) in _CELL.iter_unpack(self._board[:])):
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE)
        return True


def new_files(size: int) -> tuple[int, int]:
    """Makes the board and the log, in memory."""
    board = os.memfd_create("mlaunch-board", os.MFD_CLOEXEC)
    os.ftruncate(board, _CELL.size * size)
    return board, os.memfd_create("mlaunch-log", os.MFD_CLOEXEC)


def write(log: int, rank: int, verdict: Verdict) -> None:
    """Appends a verdict, in one piece."""
    data = pickle.dumps((rank, verdict))
    os.write(log, _LENGTH.pack(len(data)) + data)


def take(log: int) -> dict[int, Verdict]:
    """Returns what was written, and empties the log."""
    data, found = os.pread(log, os.fstat(log).st_size, 0), {}
    os.ftruncate(log, 0)
    while data:
        (length,) = _LENGTH.unpack_from(data)
        rank, verdict = pickle.loads(data[_LENGTH.size : _LENGTH.size + length])
        found[rank] = verdict
        data = data[_LENGTH.size + length :]
    return found
