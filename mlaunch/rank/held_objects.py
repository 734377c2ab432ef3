"""What a rank that stays holds between calls for its caller: objects, by the number of their handle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol import this_rank
from mlaunch.rank import by_looking


@frozen_record
class Description:
    """What a rank holds, for people. ``shape``: None unless it has one; ``size``: bytes, of all its tensors."""

    type_name: str
    shape: tuple[int, ...] | None
    size: int


@dataclass
class Table:
    """The objects of one rank. ``owner``: the launch that it belongs to; "": this process is no rank that stays."""

    owner: str = ""
    objects: dict[int, Any] = field(default_factory=dict)

    def belong_to(self, owner: str) -> None:
        """Takes in that this process has become a rank of this launch, which stays."""
        self.owner = owner

    def hold(self, number: int, found: object) -> Description:
        """Holds an object and describes it."""
        self.objects[number] = found
        return describe(found)

    def free(self, numbers: Iterable[int]) -> None:
        """Lets go of objects; of those that it never held, too."""
        for number in numbers:
            # A number is told until it was heard, so it may come twice, and of a call that failed before it held
            # anything.
            self.objects.pop(number, None)


table = Table()


def resolve(owner: str, number: int) -> Any:
    """Returns the object that a handle stands for; called as the arguments of a call are unpickled."""
    if table.owner != owner or number not in table.objects:
        raise LookupError(f"held value {number} is not in this rank: it belongs to other ranks, or was freed")
    return table.objects[number]


def fetch(value: Any, rank: int | None) -> Any:
    """Returns a held object from one rank, or from all."""
    # The other ranks answer None: a held model would travel once for each of them.
    here = this_rank.this_rank
    return value if rank is None or (here is not None and here.rank == rank) else None


def pick(values: Sequence[Any]) -> Any:
    """Returns this rank's part of scattered values; called as the arguments of a call are unpickled."""
    here = this_rank.this_rank
    if here is None:
        raise LookupError("scatter() values can only be unpickled in a rank")
    return values[here.rank]


def describe(value: object) -> Description:
    """Describes an object; runs none of its code."""
    found = by_looking.field(value, "shape")
    shape = tuple(map(int, found)) if isinstance(found, tuple) else None
    return Description(by_looking.type_name(value), shape, by_looking.size(value))
