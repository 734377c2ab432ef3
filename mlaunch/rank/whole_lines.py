"""Standard streams that several ranks share: each rank writes whole lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from select import PIPE_BUF  # bytes that a pipe takes without another's in between
from typing import Any


class WholeLines(io.BufferedWriter):
    """A buffer that writes lines when they are complete, and holds back what follows the last newline.

    ``print("a\\nb")`` arrives as two pieces, ``a\\nb`` and a newline: if ``b`` were written with the first, another
    rank's line could come between it and its end. A line with a carriage return (``\\r``) is shown at once, as by
    ``line_buffering``.
    """

    _held = 0  # bytes
    _aside = b""  # from a signal handler, to be written before anything else

    def write(self, data: Any) -> int:
        """Write the complete lines; return the number of bytes taken, which is all.

        A signal handler may call this while its thread is inside, waiting for a reader.
        """
        given = bytes(data)
        taken, self._aside = self._aside + given, b""
        end = _end_of_lines(taken)
        try:
            self._write(taken, end)
        except RuntimeError as error:
            if not _is_reentrant(error):
                raise
            # If a pipe takes the waiting piece at once, the kernel has taken all of it or nothing: this comes before or
            # after it, not in between.
            self._aside = taken[end:]
            self._write_past(memoryview(taken)[:end])
        return len(given)

    def flush(self) -> None:
        """Write everything; in a signal handler that interrupts a write of its thread, only the handler's own."""
        if not self._held and not self._aside:  # as after most calls
            return
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
        # A pipe takes up to PIPE_BUF bytes at once; into a longer write, another rank's may come.
        for piece in _pieces(taken[:end], PIPE_BUF - self._held):
            self._held += len(piece)  # until it is flushed: a handler that raises leaves it here
            super().write(piece)
            self.flush()
        if end < len(taken):
            self._held += len(taken) - end
            super().write(taken[end:])

    def _write_past(self, data: memoryview) -> None:
        """Write past the buffer, and its lock, which refuses the thread that has it already."""
        while data:
            written = self.raw.write(data)
            if not written:  # the file does not wait for its reader
                self._aside = bytes(data) + self._aside
                return
            data = data[written:]


def _end_of_lines(data: bytes) -> int:
    """Return how many bytes are complete lines."""
    end = data.rfind(b"\n") + 1
    # Bars of tqdm end without a newline for minutes.
    return len(data) if data.find(b"\r", end) >= 0 else end


def _is_reentrant(error: RuntimeError) -> bool:
    """True if a buffer of Python's has refused a thread that is inside already."""
    return str(error).startswith("reentrant call inside")


def _pieces(lines: bytes, room: int) -> Iterator[bytes]:
    """Cut between lines, so that a pipe takes each piece at once. ``room``: bytes of the first piece."""
    start = 0
    while start < len(lines):
        end = len(lines)
        if end - start > room:
            end = lines.rfind(b"\n", start, start + max(room, 0)) + 1 or lines.find(b"\n", start) + 1 or len(lines)
        yield lines[start:end]
        start, room = end, PIPE_BUF


class Text(io.TextIOWrapper):
    """A text stream on ``WholeLines``. With ``line_buffering`` it would write what is to be held back."""

    def reconfigure(self, **wanted: Any) -> None:
        """Reconfigure as ``io.TextIOWrapper`` does, but leave lines whole."""
        wanted.pop("line_buffering", None)
        super().reconfigure(**wanted)
