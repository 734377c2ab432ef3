"""Cuts what a rank prints into lines, and finds the progress bars in it."""

from __future__ import annotations

LINE_LIMIT = 1 << 20  # bytes; a longer line is shown in pieces of this size


class Splitter:
    """One stream. Lines come without their end; a line that was redrawn (``\\r``) comes as it last looked."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that this completes."""
        self._rest += data
        if b"\n" not in data and len(self._rest) <= LINE_LIMIT:
            self._forget_earlier_looks()
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        found = [piece for line in lines for piece in _pieces(_last_look(line))]
        *whole, rest = _pieces(rest)
        self._rest = bytearray(rest)
        return found + whole

    def _forget_earlier_looks(self) -> None:
        """Of a line that is redrawn for hours."""
        whole = self._rest.rstrip(b"\r")
        start = whole.rfind(b"\r")
        if start > 0:
            del self._rest[:start]

    def end(self) -> list[bytes]:
        """The line that was never completed, if there is one."""
        rest, self._rest = bytes(self._rest), bytearray()
        look = _last_look(rest)
        return _pieces(look) if rest and (look or b"\r" not in rest) else []

    @property
    def bar(self) -> bytes:
        """The present look of a line that is being redrawn; empty if none is."""
        return _last_look(bytes(self._rest)) if b"\r" in self._rest else b""


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + LINE_LIMIT] for start in range(0, len(line), LINE_LIMIT)] or [b""]


def _last_look(line: bytes) -> bytes:
    """What a terminal would show of it: what follows the last return to its start, unless that is nothing.

    A bar that goes away is overwritten with blanks.
    """
    line = line.rstrip(b"\r")
    start = line.rfind(b"\r") + 1
    return line[start:] if not start or line[start:].strip() else b""
