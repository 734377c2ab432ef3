"""When a rank wrote what was read from its pipe."""

from __future__ import annotations

from mlaunch.protocol.board import Board


class WriteTimes:
    """One stream of one rank, as the rank notes its own writes on the board.

    C code and other processes write there, too, and note nothing; what they write is taken for a part of what the rank
    wrote last before.
    """

    def __init__(self, board: Board | None, local_rank: int, stream: int) -> None:
        self._board = board
        self._place = local_rank, stream
        self._read = 0  # bytes, of those that were noted

    def skip(self, size: int) -> None:
        """Passes over as many bytes, of which nobody asks when they were written."""
        self._read += size

    def cut(self, data: bytes, now: float) -> list[tuple[float, bytes]]:
        """Cuts what was just read where writes begin; returns (when, bytes). ``now``: when nothing is known."""
        starts = self._starts(len(data)) or [(0, now)]
        ends = [start for start, _ in starts[1:]] + [len(data)]
        return [(at, data[start:end]) for (start, at), end in zip([(0, starts[0][1]), *starts[1:]], ends, strict=True)]

    def _starts(self, size: int) -> list[tuple[int, float]]:
        """Returns where writes began in the bytes that were just read, and when; the first may have begun before."""
        begin, self._read = self._read, self._read + size
        found: list[tuple[int, float]] = []
        for start, end, at in self._board.stamps(*self._place) if self._board is not None else ():
            if not found and self._read > end:  # others have written as much
                self._read = end
            if start < self._read:
                found.append((max(start - begin, 0), at))
            if start <= begin:
                break
        if not found:  # nothing that was noted has come yet
            self._read = begin
        return found[::-1]
