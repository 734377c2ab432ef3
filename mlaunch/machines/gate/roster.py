"""The machines that have joined a launch, and their order. Adding one is as cheap with many machines as with few."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from mlaunch.base.text import first_bytes, name_ranks
from mlaunch.machines.wire import Join

_NAMED, _NAME = 5, 63  # machines in a sentence, and characters of each
_RUNS = 10  # runs of numbers in a sentence
_SENTENCE = 2_000  # bytes of it


class Roster:
    """The machines that have joined, without conflicts between them: the gate adds none that has a ``conflict``."""

    def __init__(self) -> None:
        self._joins: dict[tuple[int, int], Join] = {}  # by place, in the order in which they came
        self._starts: list[tuple[int, int]] = []  # the first rank, and the number after the last, of each
        self._ranks = 0

    def __len__(self) -> int:
        return len(self._joins)

    def joins(self) -> list[Join]:
        return list(self._joins.values())

    def add(self, join: Join) -> None:
        self._joins[join.place] = join
        insort(self._starts, _span(join))
        self._ranks += join.n_gpus

    def remove(self, join: Join) -> None:
        """Remove a machine that has left."""
        del self._joins[join.place]
        del self._starts[bisect_left(self._starts, _span(join))]
        self._ranks -= join.n_gpus

    @property
    def complete(self) -> bool:
        """True if all machines of the launch have joined."""
        first = next(iter(self._joins.values()), None)
        if first is None:
            return False
        return len(self) == first.machines if first.machines else self._ranks == first.world_size

    def conflict(self, new: Join) -> str:
        """Return why ``new`` cannot join the machines here, as a message for all of them; "" if it can."""
        if new.n_gpus < 1 or (not new.machines and new.ranks[-1] >= new.world_size):
            return f"{new.who} has ranks beyond world_size={new.world_size}"
        if new.machines and new.machine >= new.machines:
            return f"{new.who} is beyond --nnodes {new.machines}"
        first = next(iter(self._joins.values()), None)
        if first is None:
            return ""
        return _difference(first, new) or self._overlap(new)  # the first is like all others

    def _overlap(self, new: Join) -> str:
        if new.machines:
            other = self._joins.get(new.place)
            both = f"both have --node-rank {new.machine}"
            return "" if other is None else f"host {other.host} and host {new.host} {both}"
        # Only neighbours can overlap with it, since the others do not overlap: comparing all pairs would be N squared.
        at = bisect_left(self._starts, _span(new))
        for start, end in self._starts[max(0, at - 1) : at + 1]:
            shared = range(max(start, new.rank_start), min(end, new.ranks.stop))
            if shared:
                other = self._joins[0, start]
                names = f"{name_ranks(shared)} would be on host {other.host} and on host {new.host}"
                return f"{names}: give each its own rank_start"
        return ""

    def missing(self) -> list[range]:
        """Return the ranks that no machine has brought or, if machines are counted, the numbers of missing machines."""
        first = next(iter(self._joins.values()))
        there, most = self._starts, first.world_size
        if first.machines:
            there, most = sorted((machine, machine + 1) for machine, _ in self._joins), first.machines
        starts, ends = [start for start, _ in there], [end for _, end in there]
        return [range(end, start) for end, start in zip([0, *ends], [*starts, most], strict=True) if start > end]

    def describe(self) -> str:
        """Return which machines are here and what is missing, such as "2 machines joined (h1, h2); ranks 8-15 missing".

        At least one machine must have joined. The text is at most ``_SENTENCE`` bytes long.
        """
        names = ", ".join(join.host[:_NAME] for join in self.joins()[:_NAMED])
        if len(self) > _NAMED:
            names += f" and {len(self) - _NAMED} more"
        machines = f"{len(self)} machine{'s' * (len(self) != 1)}"
        counted = next(iter(self._joins.values())).machines
        runs = self.missing()
        numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_RUNS])
        if len(runs) > _RUNS:
            numbers += f" and {sum(map(len, runs[_RUNS:]))} more"
        plural = "s" * (sum(map(len, runs)) != 1)
        lacking = f"machine{plural} {numbers} of {counted}" if counted else f"rank{plural} {numbers}"
        return first_bytes(f"{machines} joined ({names}); {lacking} missing", _SENTENCE)


def placed(joined: Sequence[Join]) -> list[Join]:
    """Return all machines of a launch in order. Counted machines also get their first rank and the world size."""
    ordered = sorted(joined, key=lambda machine: machine.place)
    if not ordered[0].machines:
        return ordered
    starts = [0, *accumulate(machine.n_gpus for machine in ordered)]
    return [
        replace(machine, rank_start=start, world_size=starts[-1])
        for machine, start in zip(ordered, starts, strict=False)
    ]


def role_ranks(ordered: Sequence[Join]) -> list[tuple[int, int]]:
    """Return each machine's place among all ranks of its role: the number of its first one, and how many all are."""
    sizes: Counter[str] = Counter()
    starts = []
    for machine in ordered:
        starts.append(sizes[machine.role])
        sizes[machine.role] += machine.n_gpus
    return [(start, sizes[machine.role]) for machine, start in zip(ordered, starts, strict=True)]


def _span(join: Join) -> tuple[int, int]:
    return join.rank_start, join.rank_start + join.n_gpus


def _difference(other: Join, new: Join) -> str:
    """Return the first difference between two machines that one launch does not allow; "" if there is none."""
    option = "--{} {{}}" if new.machines else "{}={{}}"  # a command's option, or the decorator's argument
    for name, words in (
        ("world_size", "world_size={}"),
        ("machines", "--nnodes {}"),
        ("function", "{} to run"),
        ("mlaunch", "mlaunch {}"),
        ("torch", "torch {}"),
        ("run_id", "--rdzv-id {}"),
        ("max_restarts", option.format("max-restarts" if new.machines else "max_restarts")),
        ("stop_grace", option.format("stop-grace" if new.machines else "stop_grace")),
        ("heartbeat_timeout", "heartbeat_timeout={}"),
        ("backend", "backend={}"),
        ("timeout", "timeout={}"),
    ):
        ours, theirs = getattr(new, name), getattr(other, name)
        if ours != theirs:
            return f"host {other.host} has {words.format(theirs)}, host {new.host} has {words.format(ours)}"
    return ""
