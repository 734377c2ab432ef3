"""The machines of a launch: what each says when it joins, and whether that fits together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import both_ends, name_ranks, printable
from mlaunch.protocol.spec import Agreed

_LONGEST = {"host": 255, "function": 1000, "role": 255, "run_id": 255}  # characters; of what is not listed here:
_SHORT = 100
MOST = 1 << 20  # ranks; a stranger's number must not cost the master its memory
_LARGEST = 1 << 31  # of other numbers: a pid, an exit code
# Without a token, whatever answers at the master's port sends the plan, and files are named by the id in it.
_PART_OF_A_PATH = re.compile("[0-9A-Za-z]{1,64}")  # by the launch's id files are named
# What other machines hear of a failure, in bytes of UTF-8: altogether less than half of a record between processes, and
# as JSON, where each may become six, less than a line of the control protocol.
_WHAT, _TRACEBACK, _DETAIL, _HINTS = 4_000, 16_000, 500, 8


@frozen_record
class Join:
    """What a machine says of itself."""

    host: str
    rank_start: int
    n_gpus: int
    world_size: int
    function: str
    mlaunch: str  # versions
    torch: str
    attempt: int  # of the launch, from 0
    role: str = "default"  # of its ranks
    machine: int = 0  # its number, where machines are counted
    machines: int = 0  # that are to join; 0: they are not counted, rank_start and world_size say who is missing
    # Options that all machines must agree on.
    max_restarts: int = 0
    heartbeat_timeout: str = ""
    timeout: str = ""
    stop_grace: str = ""
    backend: str = ""
    run_id: str = ""

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
        if not _has_shape(record, cls):
            raise ConnectionError("what came is no join")
        return cls(**record)


def agreed_of_record(record: Any, own: Join) -> Agreed:
    """Reads the plan for the machine that has said ``own`` from JSON. ConnectionError for what no gate says."""
    if not _has_shape(record, Agreed) or not _PART_OF_A_PATH.fullmatch(record["launch_id"]):
        raise ConnectionError("what came is no plan")
    plan = Agreed(**record)
    inside = plan.node_rank < plan.num_nodes <= plan.world_size
    inside &= plan.rank_start + own.n_gpus <= plan.world_size
    inside &= plan.role_start + own.n_gpus <= plan.role_size <= plan.world_size
    if not own.machines:
        inside &= (plan.rank_start, plan.world_size) == (own.rank_start, own.world_size)
    if not inside:
        raise ConnectionError("what came is no plan")
    return plan


def _has_shape(record: Any, shape: type[Join] | type[Agreed]) -> bool:
    """Tells whether that has the fields of a record, each of its type, printable, and no longer or larger than ours."""
    if not isinstance(record, dict) or record.keys() != {field.name for field in fields(shape)}:
        return False
    return all(
        is_number(record[field.name])
        if field.type == "int"
        else _is_short(record[field.name], _LONGEST.get(field.name, _SHORT))
        for field in fields(shape)
    )


def is_number(said: Any, least: int = 0, most: int = MOST) -> bool:
    """Tells whether that is a number, which JSON's true is not, from ``least`` to ``most``."""
    return type(said) is int and least <= said <= most


def _is_short(said: Any, longest: int) -> bool:
    return isinstance(said, str) and said.isprintable() and len(said) <= longest


@frozen_record
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
    """Cuts a failure to what fits into a record, its traceback to the end, all else to the beginning; and cleans it."""
    return replace(
        failure,
        what=printable(failure.what, _WHAT, lines=True),
        traceback=printable(both_ends(failure.traceback, _TRACEBACK), _TRACEBACK, last=True, lines=True),
        phase=printable(failure.phase, _DETAIL),
        host=printable(failure.host, _DETAIL),
        device=printable(failure.device, _DETAIL),
        type_name=printable(failure.type_name, _DETAIL),
        subject=printable(failure.subject, _DETAIL),
        kind=printable(failure.kind, _DETAIL),
        hints=tuple(printable(hint, _DETAIL) for hint in failure.hints[:_HINTS]),
    )


def failure_of_record(record: Any) -> RankFailure:
    """Reads a failure on another machine from its JSON; leaves out what has another type or size than it must have."""
    kinds = {"str": str, "int": int, "int | None": int, "bool": bool}
    wanted = {field.name: kinds.get(str(field.type)) for field in fields(RankFailure)}
    record = record if isinstance(record, dict) else {}
    known: dict[str, Any] = {
        name: value
        for name, value in record.items()
        # A failure is told with what of it makes sense: it may be all that is known about the launch's end.
        if type(value) is wanted.get(name) and (type(value) is not int or is_number(value, -_LARGEST, _LARGEST))
    }
    hints = tuple(map(str, record["hints"])) if isinstance(record.get("hints"), list) else ()
    return replace(RankFailure(None, 0, "failed"), **known, hints=hints)
