"""Who takes part in a launch over several machines: what each says when it joins, and whether it fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlaunch.base.errors import RankFailure
from mlaunch.base.text import name_ranks

_LONGEST = 1000  # characters: of a function's qualified name
_MOST = 1 << 20  # ranks; a stranger's number must not cost the master its memory
_WHAT, _TRACEBACK = 4_000, 16_000  # characters that other machines hear of a failure


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

    @property
    def ranks(self) -> range:
        return range(self.rank_start, self.rank_start + self.n_gpus)

    @property
    def who(self) -> str:
        return f"host {self.host} ({name_ranks(self.ranks)})"

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_record(cls, record: Any) -> Join:
        """Reads one from JSON. ConnectionError for what no machine says."""
        kinds = {"str": str, "int": int}
        if not isinstance(record, dict) or record.keys() != {field.name for field in fields(cls)}:
            raise ConnectionError("what came is no join")
        if not all(type(record[field.name]) is kinds[str(field.type)] for field in fields(cls)):
            raise ConnectionError("what came is no join")
        if not all(text.isprintable() and len(text) <= _LONGEST for text in record.values() if isinstance(text, str)):
            raise ConnectionError("what came is no join")
        if not all(0 <= number <= _MOST for number in record.values() if isinstance(number, int)):
            raise ConnectionError("what came is no join")
        return cls(**record)


def conflict(joined: Sequence[Join], new: Join) -> str:
    """Says why ``new`` does not fit to those that have joined, for all to read; "" if it does."""
    if new.n_gpus < 1 or new.ranks[-1] >= new.world_size:
        return f"{new.who} has ranks beyond world_size={new.world_size}"
    for other in joined:
        for name, words in (
            ("world_size", "world_size={}"),
            ("function", "{} to run"),
            ("mlaunch", "mlaunch {}"),
            ("torch", "torch {}"),
            ("gather", "gather={!r}"),
        ):
            ours, theirs = getattr(new, name), getattr(other, name)
            if ours != theirs:
                return f"host {other.host} has {words.format(theirs)}, host {new.host} has {words.format(ours)}"
        both = sorted(set(other.ranks) & set(new.ranks))
        if both:
            return f"{name_ranks(both)} would be on host {other.host} and on host {new.host}: the rank_start overlap"
    return ""


def missing(joined: Sequence[Join]) -> list[int]:
    """Returns the ranks that no machine has brought."""
    if not joined:
        return []
    there = {rank for machine in joined for rank in machine.ranks}
    return [rank for rank in range(joined[0].world_size) if rank not in there]


def describe(joined: Sequence[Join]) -> str:
    """Says who is there and who is not: "2 machines joined (h1, h2); ranks 8-15 missing"."""
    names = ", ".join(machine.host for machine in joined)
    return f"{len(joined)} machine{'s' * (len(joined) != 1)} joined ({names}); {name_ranks(missing(joined))} missing"


def shortened(failure: RankFailure) -> RankFailure:
    """As it fits into a record: what it says of itself from its beginning, its traceback to its end."""
    return replace(failure, what=failure.what[:_WHAT], traceback=failure.traceback[-_TRACEBACK:])


def failure_of_record(record: dict[str, Any]) -> RankFailure:
    """Reads a failure on another machine from its JSON; leaves out what has another type than it must have."""
    kinds = {"str": str, "int": int, "int | None": int, "bool": bool}
    wanted = {field.name: kinds.get(str(field.type)) for field in fields(RankFailure)}
    known: dict[str, Any] = {name: value for name, value in record.items() if type(value) is wanted.get(name)}
    hints = tuple(map(str, record.get("hints") or ()))
    return replace(RankFailure(None, 0, "failed"), **known, hints=hints)
