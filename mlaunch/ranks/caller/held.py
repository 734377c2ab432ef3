"""Handles to objects that ranks hold, values that are dealt to the ranks, and which ranks their pickles go to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlaunch.base.exceptions import misuse
from mlaunch.base.text import in_bytes, name_ranks
from mlaunch.ranks.rank import held_objects as on_ranks
from mlaunch.ranks.rank.held_objects import Description


@dataclass(frozen=True)
class Destination:
    """Ranks that stay, as a destination.

    ``owner``: their launch; ``name``: for people; ``world_size``: their number; ``used``: what was pickled that only
    these ranks understand.
    """

    owner: str
    name: str
    world_size: int
    used: list[int] = field(default_factory=list)


# By thread: a second one may be pickling for other ranks, or for none.
class _Pickling(threading.local):
    destination: Destination | None = None


_pickling = _Pickling()


def present_destination() -> Destination | None:
    """Return the destination of this thread's pickling; None if it is not for ranks that stay."""
    return _pickling.destination


class pickling_towards:
    """A block whose pickling goes to a destination."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._before: Destination | None = None

    def __enter__(self) -> None:
        self._before, _pickling.destination = _pickling.destination, self._destination

    def __exit__(self, *_: object) -> None:
        _pickling.destination = self._before


class Holder(Protocol):
    """The ranks, as a handle needs them."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Make a call."""

    @property
    def owner(self) -> str:
        """Return the ID of their present launch; "" if they are gone."""

    @property
    def free_later(self) -> Callable[[str, int], None]:
        """Return a function that makes the next call free a held object, by launch and number. It runs in any thread.

        It must not refer to the ranks: it is referred to for good, until it is called.
        """


class Held:
    """The handle of one object on each rank, which ``Ranks.hold`` makes.

    In the arguments of a call on the same ranks, at any depth, and in what a function refers to, it becomes on each
    rank that rank's object: the same one in each call. The objects are freed by ``free``, or with the next call after
    the handle is gone.

    Attributes:
        descriptions: What each rank holds: type, shape, bytes.
    """

    def __init__(self, ranks: Holder, owner: str, number: int, descriptions: Sequence[Description]) -> None:
        self.descriptions = tuple(descriptions)
        self._ranks = ranks
        self._owner = owner
        self._number = number
        self._finalizer = weakref.finalize(self, ranks.free_later, owner, number)
        self._finalizer.atexit = False

    def fetch(self, rank: int | None = None) -> Any:
        """Return the object of one rank, or the list of all ranks' objects (None)."""
        if rank is not None and not 0 <= rank < len(self.descriptions):
            raise misuse(ValueError(f"fetch(rank={rank}): allowed: 0 to {len(self.descriptions) - 1}, or None for all"))
        values = self._ranks.run(on_ranks.fetch, self, rank)
        return values if rank is None else values[rank]

    def free(self) -> None:
        """Free the objects, with the next call. May be called again."""
        self._finalizer()

    @property
    def alive(self) -> bool:
        """True while the ranks hold the objects."""
        return self._finalizer.alive and self._ranks.owner == self._owner

    def __repr__(self) -> str:
        if not self.alive:
            return f"<Held {self._number}: freed, or its ranks are gone>"
        alike: dict[Description, list[int]] = {}
        for rank, description in enumerate(self.descriptions):
            alike.setdefault(description, []).append(rank)
        parts = [f"{_describe(description)} on {name_ranks(ranks)}" for description, ranks in alike.items()]
        return f"<Held {self._number}: {'; '.join(parts)}>"

    def __reduce__(self) -> tuple[Callable[[str, int], Any], tuple[str, int]]:
        to = present_destination()
        if to is None:
            raise misuse(
                TypeError(f"{self!r} is a handle to objects in its ranks, and can be sent only to them; see fetch()")
            )
        if not self._finalizer.alive:
            raise misuse(ValueError(f"held value {self._number} was freed"))
        if to.owner != self._owner and not self.alive:
            why = "since the ranks that held it have ended; hold() it again"
            raise misuse(ValueError(f"held value {self._number} is lost, {why}"))
        if to.owner != self._owner:
            other = f"other ranks than those of {to.name}; hold it on these"
            raise misuse(ValueError(f"held value {self._number} belongs to {other}"))
        to.used.append(self._number)
        return on_ranks.resolve, (self._owner, self._number)

    def __copy__(self) -> Held:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Held:
        """Return the handle itself: there is one object on each rank, and it is freed once."""
        return self


class Scattered:
    """Values that are dealt to the ranks, one to each."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)

    def __repr__(self) -> str:
        return f"scatter({self._values!r})"

    def __reduce__(self) -> tuple[Callable[[Sequence[Any]], Any], tuple[list[Any]]]:
        to = present_destination()
        if to is None:
            raise misuse(TypeError("scatter() is for the arguments of calls on Ranks: ranks.run(f, scatter(values))"))
        if len(self._values) != to.world_size:
            raise misuse(ValueError(f"scatter() of {len(self._values)} values to {to.name}; give one for each rank"))
        return on_ranks.pick, (self._values,)


def scatter(values: Sequence[Any]) -> Any:
    """Deal values to ranks that stay: anywhere in the arguments of a call, rank i gets the i-th.

    The call raises TypeError if it is not a call on ``Ranks``, and ValueError if there are more or fewer values than
    ranks.

    Example:
        >>> losses = ranks.run(step, model, scatter(batches), lr=0.1)
    """
    return Scattered(values)


def _describe(description: Description) -> str:
    shape = "" if description.shape is None else f" {list(description.shape)}"
    return f"{description.type_name}{shape}, {in_bytes(description.size)}"
