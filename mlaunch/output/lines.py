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
        *lines, rest = bytes(self._rest).split(b"\n") if b"\n" in data else [bytes(self._rest)]
        found = [_last_look(line) for line in lines]
        while len(rest) >= LINE_LIMIT:
            found.append(rest[:LINE_LIMIT])
            rest = rest[LINE_LIMIT:]
        self._rest = bytearray(rest)
        return found

    def end(self) -> list[bytes]:
        """The line that was never completed, if there is one."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [_last_look(rest)] if rest else []

    @property
    def bar(self) -> bytes:
        """The present look of a line that is being redrawn; empty if none is."""
        return _last_look(bytes(self._rest)) if b"\r" in self._rest else b""


def _last_look(line: bytes) -> bytes:
    """What a terminal would show of it: what follows the last return to its start, unless that is nothing."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]
