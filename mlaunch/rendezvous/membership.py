"""Who takes part in a launch over several machines: what each says when it joins, and whether it fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlaunch.base.errors import RankFailure
from mlaunch.base.text import first_bytes, last_bytes, name_ranks

_LONGEST = {"host": 255, "function": 1000}  # characters; of what is not listed here:
_SHORT = 100
_NAMED = 20  # machines in a sentence
_SENTENCE = 16_000  # bytes of it
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
        texts = {name: text for name, text in record.items() if isinstance(text, str)}
        if not all(text.isprintable() and len(text) <= _LONGEST.get(name, _SHORT) for name, text in texts.items()):
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
    names = ", ".join(machine.host for machine in joined[:_NAMED])
    if len(joined) > _NAMED:
        names += f" and {len(joined) - _NAMED} more"
    machines = f"{len(joined)} machine{'s' * (len(joined) != 1)}"
    return first_bytes(f"{machines} joined ({names}); {name_ranks(missing(joined))} missing", _SENTENCE)


def shortened(failure: RankFailure) -> RankFailure:
    """Cuts a failure to what fits into a record: its traceback to the end, all else to the beginning."""
    return replace(
        failure,
        what=first_bytes(failure.what, _WHAT),
        traceback=last_bytes(failure.traceback, _TRACEBACK),
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
