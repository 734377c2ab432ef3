"""The comparison that finds ranks for which the others wait, from how long each rank waits. It reads no clock.

Ranks that wait for each other take the same time for a step. Each computes for a part of it and waits for the rest, so
a rank that computes longer waits less. No two clocks are compared. The time of the operations themselves, which is long
on a busy machine and differs between ranks, does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mlaunch.base.frozen_record import frozen_record
from mlaunch.slow.wire import Waits, WaitsOfRank

_MOST = 16384  # operations that not all members have reported yet
_ONCE = 1.0  # seconds for which a rank must delay the others to be named though that happened only once
_PARTS = 3  # parts of the time, in each of which the same ranks must be slow


@frozen_record
class WaitSample:
    """The ranks' reports at the time ``at``, on the agent's clock. ``told``: seconds elapsed and waited, by rank."""

    at: float
    told: Mapping[int, tuple[float, float]]


@frozen_record
class Chunk:
    """Some operations of one kind that all members have reported. Members are in the order of ``Lane.members``.

    Attributes:
        at: The time of the reports, on the agent's clock.
        count: The number of operations.
        sums: How long each member has waited in them, in seconds.
        lasts: How often each member was the last.
        worst: The most seconds by which the last member of an operation came after the next to last, and that member.
    """

    at: float
    count: int
    sums: tuple[float, ...]
    lasts: tuple[int, ...]
    worst: tuple[float, int]


@frozen_record
class Lateness:
    """How late some ranks come to the operations of one kind.

    Attributes:
        last: The share of the operations in which one of these ranks was the last.
        seconds: By how much they were later than the others in each, on average.
        once: The seconds for which they delayed the others, if most of that was at one time; else 0.
    """

    last: float
    seconds: float
    once: float


@frozen_record
class SlowVerdict:
    """The verdict that the others wait for some ranks.

    Attributes:
        ranks: These ranks.
        part: The share of the time by which each of the others waits longer than any of these ranks.
        share: The share of the time by which they wait longer on average.
        steadily: True if that held all the time, not only in a part of it.
    """

    ranks: tuple[int, ...]
    part: float
    share: float
    steadily: bool


class Comparison:
    """The comparison of a call's ranks over the last ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[WaitSample] = deque()
        self._told: dict[int, tuple[float, float]] = {}
        self._lanes: dict[str, Lane] = {}

    def take(self, rank: int, told: WaitsOfRank) -> None:
        """Add a rank's report of its waits since the last report."""
        elapsed, waited = self._told.get(rank, (0.0, 0.0))
        self._told[rank] = elapsed + told.elapsed, waited + told.waited
        for name, waits in told.lanes.items():
            if name not in self._lanes or self._lanes[name].members != waits.members:
                self._lanes[name] = Lane(waits.members)
            self._lanes[name].take(rank, waits)

    def conclude(self, at: float) -> None:
        """Make a sample of the reports since the last one, and drop old samples."""
        if self._told:
            self._samples.append(WaitSample(at, self._told))
            self._told = {}
        while self._samples and self._samples[0].at < at - self._seconds:
            self._samples.popleft()
        for lane in self._lanes.values():
            lane.conclude(at, at - self._seconds)

    @property
    def waits(self) -> bool:
        """True if any rank has waited for others."""
        return any(waited > 0 for sample in self._samples for _, waited in sample.told.values())

    def covers(self, seconds: float) -> bool:
        """True if the samples span at least this many seconds."""
        return len(self._samples) >= _PARTS and self._samples[-1].at - self._samples[0].at >= seconds

    def verdict(self, share: float) -> SlowVerdict | None:
        """Return for which ranks the others wait; None if fewer than two ranks have reported.

        ``share``: of the time, by which the others must wait longer in each part of it to make that steady.
        """
        samples = list(self._samples)
        waits = shares(samples)
        if len(waits) < 2:
            return None
        slow = slowest(waits)
        step = len(samples) // _PARTS
        parts = [samples[:step], samples[step:-step], samples[-step:]] if step else []
        others = fmean(wait for rank, wait in waits.items() if rank not in slow)
        return SlowVerdict(
            slow,
            part=gap(waits, slow),
            share=others - fmean(waits[rank] for rank in slow),
            steadily=bool(parts) and all(gap(shares(part), slow) >= share for part in parts),
        )

    def lateness(self, ranks: Sequence[int]) -> Lateness | None:
        """Return how late these ranks come to the operations in which they delay the others most; None if not known."""
        found = [lane.lateness(ranks) for lane in self._lanes.values() if set(ranks) < set(lane.members)]
        late = [(total, one) for total, one in found if one is not None]
        return max(late, key=lambda one: one[0])[1] if late else None


def shares(samples: Iterable[WaitSample]) -> dict[int, float]:
    """Return the share of its time for which each rank has waited. Ranks in less than half of the samples are left out.

    A rank that was stopped, or whose C code held the interpreter lock, reports the waits of that time later.
    """
    told = [sample.told for sample in samples]
    found = {}
    for rank in sorted({rank for each in told for rank in each}):
        own = [each[rank] for each in told if rank in each]
        elapsed, waited = (sum(part) for part in zip(*own, strict=True))
        if elapsed > 0 and 2 * len(own) >= len(told):
            found[rank] = min(waited / elapsed, 1.0)
    return found


def slowest(waits: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks below the widest gap in ``waits``: half of the ranks at most, as the majority is normal."""
    order = sorted(waits, key=waits.__getitem__)
    cut = max(range(1, len(order) // 2 + 1), key=lambda at: waits[order[at]] - waits[order[at - 1]])
    return tuple(sorted(order[:cut]))


def gap(waits: Mapping[int, float], slow: Sequence[int]) -> float:
    """Return by how much each of the other ranks waits longer than any of the slow ones."""
    others = [wait for rank, wait in waits.items() if rank not in slow]
    these = [waits[rank] for rank in slow if rank in waits]
    return min(others) - max(these) if others and these else 0.0


@dataclass
class Lane:
    """Operations of one kind. ``members``: global ranks."""

    members: tuple[int, ...]
    chunks: deque[Chunk] = field(default_factory=deque)
    _told: dict[int, dict[int, float]] = field(default_factory=dict)

    def take(self, rank: int, waits: Waits) -> None:
        """Add a member's report."""
        for number, waited in zip(waits.numbers, waits.waits, strict=True):
            self._told.setdefault(number, {})[rank] = waited

    def conclude(self, at: float, oldest: float) -> None:
        """Make a chunk of the operations that all members have reported, and drop old chunks."""
        whole = [number for number, told in self._told.items() if len(told) == len(self.members)]
        if whole:
            told_by_all = map(self._told.pop, whole)
            self.chunks.append(chunk_of(at, [[told[rank] for rank in self.members] for told in told_by_all]))
        for number in sorted(self._told)[:-_MOST]:
            del self._told[number]
        while self.chunks and self.chunks[0].at < oldest:
            self.chunks.popleft()

    def lateness(self, ranks: Sequence[int]) -> tuple[float, Lateness | None]:
        """Return for how many seconds these ranks delayed the others, and how late they came; None if not known."""
        count = sum(chunk.count for chunk in self.chunks)
        if not count:
            return 0.0, None
        means = {rank: sum(chunk.sums[at] for chunk in self.chunks) / count for at, rank in enumerate(self.members)}
        slow = [at for at, rank in enumerate(self.members) if rank in ranks]
        last = sum(chunk.lasts[at] for chunk in self.chunks for at in slow) / count
        seconds = gap(means, ranks)
        worst = max((chunk.worst[0] for chunk in self.chunks if chunk.worst[1] in slow), default=0.0)
        once = worst if worst >= max(_ONCE, seconds * count / 2) else 0.0
        return seconds * count, Lateness(last, seconds, once)


def chunk_of(at: float, rows: Sequence[Sequence[float]]) -> Chunk:
    """Make a chunk. ``rows``: for each operation, how long its members have waited."""
    leads = [_lead(waits) for waits in rows]
    lasts = [0] * len(rows[0])
    for _, index in leads:
        lasts[index] += 1
    return Chunk(at, len(rows), tuple(map(sum, zip(*rows, strict=True))), tuple(lasts), max(leads))


def _lead(waits: Sequence[float]) -> tuple[float, int]:
    """Return by how much the member that waited least was later than the next, and its index."""
    least, *others = sorted(waits)[:2]
    return (others[0] - least if others else 0.0), waits.index(least)
