"""Equal lines of several ranks, merged into one.

A line waits a moment for the other ranks to print the same. The order of each rank's lines, over both its streams, is
kept; a line of one rank may move behind later lines of other ranks, to be merged with theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW = 0.05  # seconds that a line waits for other ranks to print the same
_MOST = 1000  # lines that wait


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
