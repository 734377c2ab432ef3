"""The records between machines: of links and the gate, as JSON, and of an agent and its link.

link -> gate              Join, and failures
gate -> link              the plan (``Agreed``), and failures
link -> agent -> launcher Waiting, Refused, RankFailure
link -> agent             Beat, Planned, AllGone, ForPart
agent -> link             RankFailure, Done, PartSays
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import both_ends, name_ranks, printable
from mlaunch.protocol.messages import ForPart, PartSays, Refused, Waiting
from mlaunch.protocol.spec import Agreed

_LONGEST = {"host": 255, "function": 1000, "role": 255, "run_id": 255}  # characters; of other fields:
_SHORT = 100
MOST = 1 << 20  # ranks; a stranger's number must not cost the master its memory
_LARGEST = 1 << 31  # of other numbers: a pid, an exit code
# Without a token, any program at the master's port can send the plan, and the launch's id in it is part of file names.
_PART_OF_A_PATH = re.compile("[0-9A-Za-z]{1,64}")
# What other machines learn of a failure, in bytes of UTF-8: in total less than half of a record between processes, and
# as JSON, where each byte may become six, less than a line of the control protocol.
_WHAT, _TRACEBACK, _DETAIL, _HINTS = 4_000, 16_000, 500, 8


@frozen_record
class Join:
    """A machine's description of itself, with which it joins."""

    host: str
    rank_start: int
    n_gpus: int
    world_size: int
    function: str
    mlaunch: str  # versions
    torch: str
    attempt: int  # of the launch, from 0
    role: str = "default"  # of its ranks
    machine: int = 0  # its number, if machines are counted
    machines: int = 0  # how many join; 0: machines are not counted, rank_start and world_size say which are missing
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
        """The sort key of a launch's machines."""
        return (self.machine, 0) if self.machines else (0, self.rank_start)

    @property
    def who(self) -> str:
        known = name_ranks(self.ranks) if self.world_size else f"machine {self.machine}"
        return f"host {self.host} ({known})"

    def as_record(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def of_record(cls, record: Any) -> Join:
        """Return the join that a machine has sent as JSON. ConnectionError if ``record`` is not a valid one."""
        if not _has_shape(record, cls):
            raise ConnectionError("what came is no join")
        return cls(**record)


def agreed_of_record(record: Any, own: Join) -> Agreed:
    """Return the plan that the gate has sent as JSON. ConnectionError if it is invalid, or does not fit ``own``.

    ``own``: what the machine of this plan has sent to join.
    """
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
    """True if ``record`` has just the fields of ``shape``, of the right types, printable, and within their limits."""
    if not isinstance(record, dict) or record.keys() != {field.name for field in fields(shape)}:
        return False
    return all(
        is_number(record[field.name])
        if field.type == "int"
        else _is_short(record[field.name], _LONGEST.get(field.name, _SHORT))
        for field in fields(shape)
    )


def is_number(said: Any, least: int = 0, most: int = MOST) -> bool:
    """True if ``said`` is an integer from ``least`` to ``most``, which JSON's true and false are not."""
    return type(said) is int and least <= said <= most


def _is_short(said: Any, longest: int) -> bool:
    return isinstance(said, str) and said.isprintable() and len(said) <= longest


def shortened(failure: RankFailure) -> RankFailure:
    """Return the failure with its texts made printable and short enough for a record.

    A traceback that is too long loses its middle, each other text its end.
    """
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
    """Return a failure that another machine has sent as JSON, without the fields that have a wrong type or size."""
    kinds = {"str": str, "int": int, "int | None": int, "bool": bool}
    wanted = {field.name: kinds.get(str(field.type)) for field in fields(RankFailure)}
    record = record if isinstance(record, dict) else {}
    known: dict[str, Any] = {
        name: value
        for name, value in record.items()
        # A failure with some invalid fields is kept: it may be all that is known about the launch's end.
        if type(value) is wanted.get(name) and (type(value) is not int or is_number(value, -_LARGEST, _LARGEST))
    }
    hints = tuple(map(str, record["hints"])) if isinstance(record.get("hints"), list) else ()
    return replace(RankFailure(None, 0, "failed"), **known, hints=hints)


@frozen_record
class Planned:
    """The plan: all machines have joined. ``interface``: this machine's network interface to the master."""

    agreed: Agreed
    interface: str


@frozen_record
class Beat:
    """A heartbeat of the link. Without it, the agent counts the link as lost, as other machines do."""


@frozen_record
class Done:
    """The agent's message that this machine's ranks are gone."""


@frozen_record
class AllGone:
    """The link's message that every machine's ranks are gone."""


LinkHears = RankFailure | PartSays | Done
LinkSays = Waiting | Refused | RankFailure | Beat | Planned | AllGone | ForPart
