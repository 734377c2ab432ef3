"""Who takes part in a launch over several machines: what each says when it joins, and whether it fits together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

from mlaunch.base.errors import RankFailure
from mlaunch.base.text import both_ends, first_bytes, name_ranks

_LONGEST = {"host": 255, "function": 1000, "role": 255}  # characters; of what is not listed here:
_SHORT = 100
_MOST = 1 << 20  # ranks; a stranger's number must not cost the master its memory
# What other machines hear of a failure, in bytes of UTF-8: altogether less than half of a record between processes, and
# as JSON, where each may become six, less than a line of the control protocol.
_WHAT, _TRACEBACK, _DETAIL, _HINTS = 4_000, 16_000, 500, 8


@dataclass(frozen=True)
class Join:
    """What a machine says of itself."""

    host: str
    rank_start: int
    n_gpus: int
    world_size: int
    function: str
    mlaunch: str  # versions
    torch: str
    gather: str  # whose values its call returns
    attempt: int  # of the launch, from 0
    role: str = "default"  # of its ranks
    machine: int = 0  # its number, where machines are counted
    machines: int = 0  # that are to join; 0: they are not counted, rank_start and world_size say who is missing

    @property
    def ranks(self) -> range:
        return range(self.rank_start, self.rank_start + self.n_gpus)

    @property
    def place(self) -> tuple[int, int]:
        """By which the machines of a launch are ordered."""
        return (self.machine, 0) if self.machines else (0, self.rank_start)

    @property
    def who(self) -> str:
        known = name_ranks(self.ranks) if self.world_size else f"machine {self.machine}"
        return f"host {self.host} ({known})"

    def as_record(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def of_record(cls, record: Any) -> Join:
        """Reads one from JSON. ConnectionError for what no machine says."""
        kinds = {"str": str, "int": int}
        if not isinstance(record, dict) or record.keys() != {field.name for field in fields(cls)}:
            raise ConnectionError("what came is no join")
        if not all(type(record[field.name]) is kinds[str(field.type)] for field in fields(cls)):
            raise ConnectionError("what came is no join")
        texts = {name: text for name, text in record.items() if isinstance(text, str)}
        if not all(text.isprintable() and len(text) <= _LONGEST.get(name, _SHORT) for name, text in texts.items()):
            raise ConnectionError("what came is no join")
        if not all(0 <= number <= _MOST for number in record.values() if isinstance(number, int)):
            raise ConnectionError("what came is no join")
        return cls(**record)


@dataclass(frozen=True)
class RoleRanks:
    """Where a machine's ranks stand among all with the same role."""

    start: int
    size: int


def placed(joined: Sequence[Join]) -> list[Join]:
    """Returns all machines of a launch in their order, with the ranks of those that were only counted."""
    ordered = sorted(joined, key=lambda machine: machine.place)
    if not ordered[0].machines:
        return ordered
    starts = [0, *accumulate(machine.n_gpus for machine in ordered)]
    return [
        replace(machine, rank_start=start, world_size=starts[-1])
        for machine, start in zip(ordered, starts, strict=False)
    ]


def role_ranks(ordered: Sequence[Join]) -> list[RoleRanks]:
    """Returns what each machine's ranks are among those of their role."""
    sizes: Counter[str] = Counter()
    starts = []
    for machine in ordered:
        starts.append(sizes[machine.role])
        sizes[machine.role] += machine.n_gpus
    return [RoleRanks(start, sizes[machine.role]) for machine, start in zip(ordered, starts, strict=True)]


def shortened(failure: RankFailure) -> RankFailure:
    """Cuts a failure to what fits into a record: its traceback to the end, all else to the beginning."""
    return replace(
        failure,
        what=first_bytes(failure.what, _WHAT),
        traceback=both_ends(failure.traceback, _TRACEBACK),
        phase=first_bytes(failure.phase, _DETAIL),
        host=first_bytes(failure.host, _DETAIL),
        device=first_bytes(failure.device, _DETAIL),
        type_name=first_bytes(failure.type_name, _DETAIL),
        subject=first_bytes(failure.subject, _DETAIL),
        hints=tuple(first_bytes(hint, _DETAIL) for hint in failure.hints[:_HINTS]),
    )


def failure_of_record(record: dict[str, Any]) -> RankFailure:
    """Reads a failure on another machine from its JSON; leaves out what has another type than it must have."""
    kinds = {"str": str, "int": int, "int | None": int, "bool": bool}
    wanted = {field.name: kinds.get(str(field.type)) for field in fields(RankFailure)}
    known: dict[str, Any] = {name: value for name, value in record.items() if type(value) is wanted.get(name)}
    hints = tuple(map(str, record["hints"])) if isinstance(record.get("hints"), list) else ()
    return replace(RankFailure(None, 0, "failed"), **known, hints=hints)
