"""Notes when a rank writes what, so that who reads the pipes of several ranks can tell which line came first."""

from __future__ import annotations

import io
from typing import Any

from mlaunch.protocol.board import Board


class StampedFile(io.FileIO):
    """A standard stream of a rank. The time is noted before the bytes are written, so no reader is ahead of it."""

    def __init__(self, fd: int, board: Board, local_rank: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._place = board, local_rank, fd
        self._written = 0

    def write(self, data: Any) -> int:
        board, local_rank, stream = self._place
        board.stamp(local_rank, stream, self._written, self._written + len(data))
        written = super().write(data) or 0
        self._written += written
        return written
