"""The agent's part of ``slow=``: it asks the ranks every few seconds how long they have waited, and compares them.

Ranks that wait for each other take the same time for a step. Each computes for a part of it and waits for the rest, so
a rank that computes longer waits less. No two clocks are compared. The time of the operations themselves, which is long
on a busy machine and differs between ranks, does not count. On several machines, the agent of rank 0 compares what the
others send it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import in_seconds, name_some_ranks, printable
from mlaunch.core.parts import AgentPart
from mlaunch.slow.wire import NAME, SlowRanks, SlowTerms, TellWaits, Waits, WaitsOfRank

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene

_NOTHING = "nothing to compare yet: no rank has waited for others, in collectives on CPUs or in DDP"
_MOST = 16384  # operations that not all members have reported yet
_ONCE = 1.0  # seconds for which a rank must delay the others to be named though that happened only once
_PARTS = 3  # parts of the time, in each of which the same ranks must be slow
_LANES = 4  # lanes that a machine reports: those in which its ranks wait longest
_ROWS = 16  # operations of each
_MICROSECONDS = 1e6
_TEXT = 500  # bytes


class SlowWatch(AgentPart):
    """The watch over the ranks of the current call; on the machine of rank 0, over the ranks of all machines."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._clock = scene, scene.clock
        self._terms = cast("SlowTerms", scene.sections[NAME])
        self._judges = scene.is_alone or any(rank.rank == 0 for rank in scene.ranks)
        self._next_at = self._clock() + self._terms.every
        self._forget()

    def _forget(self) -> None:
        self._comparison = Comparison(self._terms.seconds)
        self._has_told = False
        self._slow: tuple[tuple[int, ...], float] = (), 0.0  # the slow ranks, and since when they are
        self._told: dict[int, WaitsOfRank] = {}  # reports of this machine's ranks since the last comparison
        self._facts: Mapping[str, object] = {"text": _NOTHING}
        self._said: object = None  # the last message to the other machines

    def due(self) -> list[float]:
        return [self._next_at]

    def take_steps(self) -> None:
        if self._clock() < self._next_at:
            return
        self._next_at = self._clock() + self._terms.every
        told, self._told = self._told, {}
        if not self._judges:
            if told:
                self._scene.tell_machines(word_of_waits(self._scene.call, told))
        else:
            self._compare(told)
        for rank in self._scene.working():
            self._scene.ask(rank, TellWaits(), self._take)

    def _take(self, rank: int, told: WaitsOfRank | None) -> None:
        if told is not None:
            self._told[rank] = told

    def hear_machines(self, word: Any) -> None:
        if self._judges:
            for rank, told in waits_of_word(word, self._scene.call).items():
                self._comparison.take(rank, told)
            return
        facts, slow = verdict_of_word(word)
        self._facts = facts or self._facts
        if slow is not None and self._scene.machines_agree:  # otherwise one caller receives the news of all machines
            self._scene.say(slow)

    def _compare(self, told: Mapping[int, WaitsOfRank]) -> None:
        for rank, waits in told.items():
            self._comparison.take(rank, waits)
        self._comparison.conclude(self._clock())
        slow = self._judge()
        self._facts = self._find_facts()
        if slow is not None:
            self._scene.say(slow)
        word = word_of_verdict(self._facts, slow)
        if not self._scene.is_alone and word != self._said:
            self._said = word
            self._scene.tell_machines(word)

    def _judge(self) -> SlowRanks | None:
        """Return the slow ranks, once for each call."""
        verdict = self._comparison.verdict(self._terms.share)
        if verdict is None or verdict.part < self._terms.share:
            self._slow = (), 0.0
            return None
        if self._slow[0] != verdict.ranks:
            self._slow = verdict.ranks, time.time() - self._terms.every
        covered = self._comparison.covers(self._terms.seconds - 2 * self._terms.every)
        if self._has_told or not (covered and verdict.steadily):
            return None
        self._has_told = True
        late = self._comparison.lateness(verdict.ranks) or Lateness(0.0, 0.0, 0.0)
        text = self._text(verdict, late)
        return SlowRanks(verdict.ranks, late.last, late.seconds, verdict.share, self._slow[1], text)

    def _text(self, verdict: SlowVerdict, late: Lateness) -> str:
        who = name_some_ranks(verdict.ranks)
        waits = f"the others wait {verdict.share:.0%} of their time"
        if late.once:
            return f"{who} held up the others once in the last {self._terms.seconds:g} s, for {in_seconds(late.once)}"
        at = time.strftime("%H:%M:%S", time.localtime(self._slow[1]))
        if not late.last:
            return f"the others have waited for {who} since {at}, for {verdict.share:.0%} of their time"
        often, each = f"{late.last:.0%} of the collectives since {at}", in_seconds(late.seconds)
        return f"{who} came last to {often}, by {each} each ({waits})"

    def _find_facts(self) -> Mapping[str, object]:
        """Work out the facts about the ranks that are slow now."""
        verdict = self._comparison.verdict(self._terms.share)
        if verdict is None or not self._comparison.waits:
            return {"text": _NOTHING}
        late = self._comparison.lateness(verdict.ranks) or Lateness(0.0, 0.0, 0.0)
        if verdict.part < self._terms.share and not late.once:
            return {"text": f"no rank makes the others wait for more than {100 * self._terms.share:.3g}% of their time"}
        ranks = list(verdict.ranks)
        return {"text": self._text(verdict, late), "ranks": ranks, "seconds": late.seconds, "share": verdict.share}

    def facts(self) -> Mapping[str, object]:
        """Return the last facts about slow ranks, for ``mlaunch ps`` and ``mlaunch why``."""
        return self._facts

    def over(self) -> None:
        """Drop the comparison of the call that is over."""
        self._forget()


part = SlowWatch


# The comparison, which reads no clock


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
        waits = _shares(samples)
        if len(waits) < 2:
            return None
        slow = _slowest(waits)
        step = len(samples) // _PARTS
        parts = [samples[:step], samples[step:-step], samples[-step:]] if step else []
        others = fmean(wait for rank, wait in waits.items() if rank not in slow)
        return SlowVerdict(
            slow,
            part=_gap(waits, slow),
            share=others - fmean(waits[rank] for rank in slow),
            steadily=bool(parts) and all(_gap(_shares(part), slow) >= share for part in parts),
        )

    def lateness(self, ranks: Sequence[int]) -> Lateness | None:
        """Return how late these ranks come to the operations in which they delay the others most; None if not known."""
        found = [lane.lateness(ranks) for lane in self._lanes.values() if set(ranks) < set(lane.members)]
        late = [(total, one) for total, one in found if one is not None]
        return max(late, key=lambda one: one[0])[1] if late else None


def _shares(samples: Iterable[WaitSample]) -> dict[int, float]:
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


def _slowest(waits: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks below the widest gap in ``waits``: half of the ranks at most, as the majority is normal."""
    order = sorted(waits, key=waits.__getitem__)
    cut = max(range(1, len(order) // 2 + 1), key=lambda at: waits[order[at]] - waits[order[at - 1]])
    return tuple(sorted(order[:cut]))


def _gap(waits: Mapping[int, float], slow: Sequence[int]) -> float:
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
            self.chunks.append(_chunk_of(at, [[told[rank] for rank in self.members] for told in told_by_all]))
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
        seconds = _gap(means, ranks)
        worst = max((chunk.worst[0] for chunk in self.chunks if chunk.worst[1] in slow), default=0.0)
        once = worst if worst >= max(_ONCE, seconds * count / 2) else 0.0
        return seconds * count, Lateness(last, seconds, once)


def _chunk_of(at: float, rows: Sequence[Sequence[float]]) -> Chunk:
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


# The messages between the agents of several machines, as JSON. Each agent checks what it receives.


def word_of_waits(call: int, waits: Mapping[int, WaitsOfRank]) -> dict[str, Any]:
    """Return the message about the waits of this machine's ranks, by global rank. It has a part of the operations."""
    ranks = {rank: [told.elapsed, told.waited] for rank, told in waits.items()}
    lanes = sorted({name for told in waits.values() for name in told.lanes})
    lanes.sort(key=lambda name: -sum(sum(told.lanes[name].waits) for told in waits.values() if name in told.lanes))
    rows = {}
    for name in lanes[:_LANES]:
        own = {rank: told.lanes[name] for rank, told in waits.items() if name in told.lanes}
        step = _step(max(len(lane.numbers) for lane in own.values()))
        members = next(iter(own.values())).members
        rows[name] = [members, {rank: _thinned(lane, step) for rank, lane in own.items() if lane.members == members}]
    return {"call": call, "ranks": ranks, "lanes": rows}


def waits_of_word(word: Mapping[str, Any], call: int) -> dict[int, WaitsOfRank]:
    """Read a message of ``word_of_waits``; {} if it is about another call, or is malformed."""
    try:
        if word["call"] != call:
            return {}
        lanes: dict[int, dict[str, Waits]] = {int(rank): {} for rank in word["ranks"]}
        for name, (members, told) in word["lanes"].items():
            for rank, (numbers, waits) in told.items():
                seconds = array("d", [wait / _MICROSECONDS for wait in waits])
                lanes[int(rank)][name] = Waits(tuple(map(int, members)), array("q", numbers), seconds)
        return {
            int(rank): WaitsOfRank(float(elapsed), float(waited), lanes[int(rank)])
            for rank, (elapsed, waited) in word["ranks"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def word_of_verdict(facts: Mapping[str, object], slow: SlowRanks | None) -> dict[str, Any]:
    """Return the message with the facts that ``mlaunch ps`` shows on each machine, and the slow ranks to report now."""
    return {"facts": dict(facts), "slow": None if slow is None else asdict(slow)}


def verdict_of_word(word: Mapping[str, Any]) -> tuple[dict[str, object], SlowRanks | None]:
    """Read a message of ``word_of_verdict``; no facts if it is malformed."""
    try:
        facts = {str(name): _fact(value) for name, value in word["facts"].items()}
        if (slow := word["slow"]) is None:
            return facts, None
        last, seconds, share, since = (float(slow[name]) for name in ("last", "seconds", "share", "since"))
        ranks, text = tuple(map(int, slow["ranks"])), printable(str(slow["text"]), _TEXT)
        return facts, SlowRanks(ranks, last, seconds, share, since, text)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}, None


def _fact(value: object) -> object:
    if isinstance(value, list):
        return [int(rank) for rank in value]
    return value if isinstance(value, int | float) else printable(str(value), _TEXT)


def _step(count: int) -> int:
    """Return n to send each n-th operation. It is a power of two, so that all machines send the same operations."""
    step = 1
    while count > _ROWS * step:
        step *= 2
    return step


def _thinned(waits: Waits, step: int) -> list[list[int]]:
    rows = [row for row in zip(waits.numbers, waits.waits, strict=True) if row[0] % step == 0]
    return [[number for number, _ in rows], [round(waited * _MICROSECONDS) for _, waited in rows]]
