"""The output of a rank cut into lines, with its bars and the times of writing; and equal lines of ranks merged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlaunch.protocol.board import Board

_RANK_TAIL = 64 * 1024  # bytes of a rank
_TAILS = 1024 * 1024  # bytes of all ranks: a launcher keeps several reports
LINE_LIMIT = 1 << 20  # bytes; a longer line is shown in pieces of this size

# tqdm draws the second of two bars below the first, and returns: lines down, the bar, as many lines up.
_BELOW = re.compile(rb"(\n+)\r([^\r\n]*?)((?:\x1b\[A)+)")
_UP = b"\x1b[A"
_LOOK = re.compile(rb"\x1b\[[0-9;:]*m")  # colours, bold and the like, from here on
_PLAIN = b"\x1b[0m"
_MOST_LOOKS = 8  # that are on at the same time

WINDOW = 0.05  # seconds that a line waits for other ranks to print the same
_MOST = 1000  # lines that wait


class LineSplitter:
    """The lines of one stream, without their ends. Of a line that was redrawn (``\\r``), the last version comes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._look = b""  # that the latest line has left on
        self._below: dict[int, bytes] = {}  # looks of bars, by how many lines below the line that is being redrawn
        self.holding = 0  # lines that have ended, unless what comes next returns to them

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that this completes."""
        self._rest += data
        if _UP in self._rest:
            self._rest = bytearray(_BELOW.sub(self._keep_below, bytes(self._rest)))
        if b"\n" not in self._rest and len(self._rest) <= LINE_LIMIT:
            self._forget_earlier_looks()
            self.holding = 0
            return []
        end = self._held_from()
        self.holding = self._rest.count(b"\n", end)
        return self._cut(end)

    def release(self) -> list[bytes]:
        """Return the lines that are held: nothing has come that redraws them."""
        self.holding = 0
        return self._cut(len(self._rest))

    def end(self) -> list[bytes]:
        """Return the held lines, and the line that was never completed."""
        if not self._rest:
            return []
        lines = self.release()
        rest, self._rest = bytes(self._rest), bytearray()
        look = _last_look(rest)
        return lines + [self._end_look(piece) for piece in _pieces(look) if rest and (look or b"\r" not in rest)]

    @property
    def bars(self) -> list[bytes]:
        """The present versions of lines that are being redrawn."""
        first = bytes(self._rest).partition(b"\n")[0]
        looks = [_last_look(first) if b"\r" in first else b"", *(self._below[depth] for depth in sorted(self._below))]
        return [look for look in looks if look]

    def _cut(self, end: int) -> list[bytes]:
        """Return the lines up to a place. The last may be incomplete, unless something is held."""
        *lines, rest = bytes(self._rest[:end]).split(b"\n")
        found = [piece for line in lines for piece in _pieces(_last_look(line))]
        *whole, rest = _pieces(rest)
        self._rest = bytearray(rest) + self._rest[end:]
        return [self._end_look(line) for line in found + whole]

    def _end_look(self, line: bytes) -> bytes:
        """Switch colours off at the line's end, and on again in the next: another rank's line may come in between."""
        if not self._look and b"\x1b[" not in line:
            return line
        line = self._look + line
        looks = [found[0] for found in _LOOK.finditer(line)]
        last = max((at for at, look in enumerate(looks) if look in {b"\x1b[m", _PLAIN}), default=-1)
        self._look = b"".join(list(dict.fromkeys(looks[last + 1 :]))[-_MOST_LOOKS:])
        return line + _PLAIN if self._look else line

    def _held_from(self) -> int:
        """Return the beginning of the line that may be redrawn; the end of all if there is none.

        It is empty or a bar, with nothing below it yet, or something that was drawn once.
        """
        rest = self._rest
        last = rest.rfind(b"\n")
        below = rest[last + 1 :]
        end = len(rest[: last + 1].rstrip(b"\n"))
        start = rest.rfind(b"\n", 0, end) + 1
        line = rest[start:end].rstrip(b"\r")
        open_below = not below or (below.startswith(b"\r") and b"\r" not in below[1:])
        may_return = last >= 0 and open_below and (not line or b"\r" in line) and len(rest) - start <= LINE_LIMIT
        return start if may_return else len(rest)

    def _keep_below(self, found: re.Match[bytes]) -> bytes:
        depth = len(found[1])
        if len(found[3]) != depth * len(_UP):
            return found[0]
        self._below[depth] = found[2].rstrip()
        return b""

    def _forget_earlier_looks(self) -> None:
        """Forget earlier versions of a line that may be redrawn for hours."""
        whole = self._rest.rstrip(b"\r")
        start = whole.rfind(b"\r")
        if start > 0:
            del self._rest[:start]


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + LINE_LIMIT] for start in range(0, len(line), LINE_LIMIT)] or [b""]


def _last_look(line: bytes) -> bytes:
    """Return what a terminal would show of a line: the part after the last return; "" if that is blank.

    A bar that goes away is overwritten with blanks.
    """
    line = line.rstrip(b"\r")
    start = line.rfind(b"\r") + 1
    return line[start:] if not start or line[start:].strip() else b""


class Tails:
    """The latest lines of ``size`` ranks, for their call's report."""

    def __init__(self, size: int) -> None:
        self._limit = min(_RANK_TAIL, _TAILS // max(size, 1))
        self._tails: dict[int, bytearray] = {}

    def add(self, rank: int, lines: Sequence[bytes]) -> None:
        tail = self._tails.setdefault(rank, bytearray())
        tail += b"".join(line + b"\n" for line in lines)
        if len(tail) > 2 * self._limit:  # so that there is more than the limit if anything was cut
            del tail[: -self._limit - 1]

    def of_ranks(self) -> dict[int, bytes]:
        """Return the tails of the ranks that have printed, each beginning with a whole line if possible."""
        return {rank: self._whole(tail) for rank, tail in self._tails.items()}

    def _whole(self, tail: bytearray) -> bytes:
        if len(tail) <= self._limit:
            return bytes(tail)
        start = tail.find(b"\n", -self._limit - 1) + 1
        return bytes(tail[start if start < len(tail) else -self._limit :])


class WriteTimes:
    """The times of writing to one stream of one rank, as the rank notes them on the board.

    C code and other processes write there, too, and note nothing; their output counts as part of the rank's last write.
    """

    def __init__(self, board: Board | None, local_rank: int, stream: int) -> None:
        self._board = board
        self._place = local_rank, stream
        self._read = 0  # bytes, of those that were noted

    def skip(self, size: int) -> None:
        """Skip bytes whose time of writing is not needed."""
        self._read += size

    def cut(self, data: bytes, now: float) -> list[tuple[float, bytes]]:
        """Cut what was just read where writes begin; return (time, bytes). ``now``: the time if none is known."""
        starts = self._starts(len(data)) or [(0, now)]
        ends = [start for start, _ in starts[1:]] + [len(data)]
        return [(at, data[start:end]) for (start, at), end in zip([(0, starts[0][1]), *starts[1:]], ends, strict=True)]

    def _starts(self, size: int) -> list[tuple[int, float]]:
        """Return (position, time) of the writes in the bytes that were just read; the first may have begun before."""
        begin, self._read = self._read, self._read + size
        found: list[tuple[int, float]] = []
        for start, end, at in self._board.stamps(*self._place) if self._board is not None else ():
            if not found and self._read > end:  # unnoted writes of the same length
                self._read = end
            if start < self._read:
                found.append((max(start - begin, 0), at))
            if start <= begin:
                break
        if not found:  # nothing that was noted has come yet
            self._read = begin
        return found[::-1]


# A line waits a moment for the other ranks to print the same. The order of each rank's lines, over both its streams, is
# kept; a line of one rank may move behind later lines of other ranks, to be merged with theirs.


@dataclass
class Line:
    """A line that waits. ``stream``: 1 or 2. ``at``: the time at which it came."""

    stream: int
    text: bytes
    at: float
    number: int = 0
    ranks: list[int] = field(default_factory=list)


class Merger:
    """The waiting lines of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[Line] = []
        self._alike: dict[tuple[int, bytes], list[Line]] = {}  # the same lines, by stream and text
        self._latest: dict[int, int] = {}  # of each rank, the number of its latest line
        self._count = 0

    def add(self, rank: int, stream: int, text: bytes, now: float) -> None:
        after = self._latest.get(rank, -1)  # so two lines of a rank are never merged
        alike = self._alike.setdefault((stream, text), [])
        line = next((line for line in alike if line.number > after or self._may_move(line, rank)), None)
        if line is None:
            line = Line(stream, text, now)
            alike.append(line)
            self._append(line)
        elif line.number < after:
            self._waiting.remove(line)
            self._append(line)
        line.ranks.append(rank)
        self._latest |= dict.fromkeys(line.ranks, line.number)

    def _may_move(self, line: Line, rank: int) -> bool:
        """True if it can be shown after the latest line of another rank: no line of its own ranks follows it."""
        return rank not in line.ranks and all(self._latest[other] == line.number for other in line.ranks)

    def _append(self, line: Line) -> None:
        line.number = self._count
        self._waiting.append(line)
        self._count += 1

    def take(self, now: float, *, everything: bool = False) -> list[Line]:
        """Return the lines that have waited long enough, in their order."""
        taken = 0
        for line in self._waiting:
            late = now - line.at >= WINDOW or len(self._waiting) - taken > _MOST
            if not (everything or late or len(line.ranks) == self._size):
                break
            taken += 1
        lines, self._waiting = self._waiting[:taken], self._waiting[taken:]
        for line in lines:
            alike = self._alike[line.stream, line.text]
            alike.remove(line)
            if not alike:
                del self._alike[line.stream, line.text]
        return lines

    @property
    def due(self) -> float | None:
        """The time at which the next line has waited long enough; None if none waits."""
        return self._waiting[0].at + WINDOW if self._waiting else None
