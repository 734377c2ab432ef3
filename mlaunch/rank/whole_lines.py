"""Standard streams that several ranks write to: what one writes is whole lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from select import PIPE_BUF  # bytes that a pipe takes at once, or with another's between them
from typing import Any


class WholeLines(io.BufferedWriter):
    """Writes lines as they are completed, and holds back what follows the last newline.

    ``print("a\\nb")`` comes here as two pieces, ``a\\nb`` and a newline: were ``b`` written with the first, another
    rank's line could come between it and its end. A line that was returned from (``\\r``) is shown at once, as by
    ``line_buffering``.
    """

    _held = 0  # bytes

    def write(self, data: Any) -> int:
        """Writes what is complete; returns how much was taken, which is all."""
        taken = bytes(data)
        end = taken.rfind(b"\n") + 1
        # Bars of tqdm end without a newline for minutes.
        if taken.find(b"\r", end) >= 0:
            end = len(taken)
        # The kernel takes up to PIPE_BUF bytes as one; of a longer write, another rank's may come in between.
        for piece in _pieces(taken[:end], PIPE_BUF - self._held):
            super().write(piece)
            self.flush()
        if end < len(taken):
            super().write(taken[end:])
            self._held += len(taken) - end
        return len(taken)

    def flush(self) -> None:
        """Writes everything."""
        super().flush()
        self._held = 0


def _pieces(lines: bytes, room: int) -> Iterator[bytes]:
    """Cuts between lines, so that a pipe takes each piece at once. ``room``: bytes of the first; a line is not cut."""
    start = 0
    while start < len(lines):
        end = len(lines)
        if end - start > room:
            end = lines.rfind(b"\n", start, start + max(room, 0)) + 1 or lines.find(b"\n", start) + 1 or len(lines)
        yield lines[start:end]
        start, room = end, PIPE_BUF


class Text(io.TextIOWrapper):
    """A stream on ``WholeLines``, which sees each write. ``line_buffering`` would write what is to be held back."""

    def reconfigure(self, **wanted: Any) -> None:
        """Changes what ``io.TextIOWrapper.reconfigure`` changes, except that lines stay whole."""
        wanted.pop("line_buffering", None)
        super().reconfigure(**wanted)
