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
    _aside = b""  # of a signal handler, to be written before what comes next

    def write(self, data: Any) -> int:
        """Write what is complete; return how much was taken, which is all.

        A signal handler may call it while the same thread is inside, and waits for a reader.
        """
        given = bytes(data)
        taken, self._aside = self._aside + given, b""
        end = _end_of_lines(taken)
        try:
            self._write(taken, end)
        except RuntimeError as error:
            if not _is_reentrant(error):
                raise
            # What waits has been taken by the kernel whole or not at all, if a pipe takes it at once. So this comes
            # before it, and not between.
            self._aside = taken[end:]
            self._write_past(memoryview(taken)[:end])
        return len(given)

    def flush(self) -> None:
        """Write everything; in a signal handler that meets a write of its thread, nothing but what it has itself."""
        aside, self._aside = self._aside, b""
        try:
            if aside:
                super().write(aside)
            super().flush()
            self._held = 0
        except RuntimeError as error:
            if not _is_reentrant(error):
                raise
            self._write_past(memoryview(aside))

    def _write(self, taken: bytes, end: int) -> None:
        # The kernel takes up to PIPE_BUF bytes as one; of a longer write, another rank's may come in between.
        for piece in _pieces(taken[:end], PIPE_BUF - self._held):
            self._held += len(piece)  # until it is flushed: a handler that raises leaves it here
            super().write(piece)
            self.flush()
        if end < len(taken):
            super().write(taken[end:])
            self._held += len(taken) - end

    def _write_past(self, data: memoryview) -> None:
        """Write past the buffer, and its lock, which refuses the thread that has it already."""
        while data:
            written = self.raw.write(data)
            if not written:  # the file does not wait for its reader
                self._aside = bytes(data) + self._aside
                return
            data = data[written:]


def _end_of_lines(data: bytes) -> int:
    """Return how much of it is complete."""
    end = data.rfind(b"\n") + 1
    # Bars of tqdm end without a newline for minutes.
    return len(data) if data.find(b"\r", end) >= 0 else end


def _is_reentrant(error: RuntimeError) -> bool:
    """True if a buffer of Python's has refused a thread that is inside already."""
    return str(error).startswith("reentrant call inside")


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
