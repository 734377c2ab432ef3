"""Objects that a rank that stays holds for its caller between calls, by the number of their handle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol import this_rank
from mlaunch.rank import rank_imports, safe_inspection


@frozen_record
class Description:
    """A held object, for people. ``shape``: None unless it has one; ``size``: bytes of all its tensors."""

    type_name: str
    shape: tuple[int, ...] | None
    size: int


@dataclass
class Table:
    """The objects of one rank. ``owner``: the launch that it belongs to; "": this process is no rank that stays."""

    owner: str = ""
    objects: dict[int, Any] = field(default_factory=dict)

    def hold(self, number: int, found: object) -> Description:
        """Hold an object and describe it."""
        self.objects[number] = found
        return describe(found)

    def free(self, numbers: Iterable[int]) -> None:
        """Drop objects, if they are held."""
        for number in numbers:
            # The caller repeats a number until it has been received, and sends those of calls that failed early.
            self.objects.pop(number, None)


table = Table()


def resolve(owner: str, number: int) -> Any:
    """Return the object of a handle; called as the arguments of a call are unpickled."""
    if table.owner != owner or number not in table.objects:
        raise LookupError(f"held value {number} is not in this rank: it belongs to other ranks, or was freed")
    return table.objects[number]


def fetch(value: Any, rank: int | None) -> Any:
    """Return a held object from one rank (None: from each)."""
    # The other ranks answer None: each would send its model.
    here = this_rank.this_rank
    return value if rank is None or (here is not None and here.rank == rank) else None


def pick(values: Sequence[Any]) -> Any:
    """Return this rank's part of scattered values; called as the arguments of a call are unpickled."""
    here = this_rank.this_rank
    if here is None:
        raise LookupError("scatter() values can only be unpickled in a rank")
    return values[here.rank]


def finish_reload() -> list[int]:
    """Finish a reload that went well on all ranks; return the numbers of held objects whose classes were replaced."""
    names = rank_imports.finish_reload()
    # To isinstance() they are of no class that the module has now.
    return [number for number, found in table.objects.items() if type(found).__module__ in names]


def describe(value: object) -> Description:
    """Describe an object; run none of its code."""
    found = safe_inspection.field(value, "shape")
    shape = tuple(map(int, found)) if isinstance(found, tuple) else None
    return Description(safe_inspection.type_name(value), shape, safe_inspection.size(value))
