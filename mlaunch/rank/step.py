"""Whether this rank is in step with the others: the operations that it has entered, in each process group.

A rank that comes back from a call early leaves the others in an operation that it never entered. From then on every
operation would meet another one's partner. torch numbers the operations of each group, on each rank: where the numbers
of all members agree, everybody has entered what the others have. It counts the groups, too, and names the next one by
that, so a rank that was called back while it made one would wait for the others under another name.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# By group: its members, and the operations since the call began; None where the backend does not number them.
Numbers = Mapping[str, tuple[tuple[int, ...], int | None]]
_GROUPS = "groups"  # among them, as if it were the name of one: the groups of the whole world that were begun


@dataclass(frozen=True)
class _Beginning:
    """Where this rank stood as a call began."""

    call: int = 0  # its number
    numbers: Mapping[str, int | None] = field(default_factory=dict)


@dataclass
class _Present:
    """Exchanged as one, since a thread reads it."""

    beginning: _Beginning = field(default_factory=_Beginning)


_present = _Present()


@functools.cache
def _world() -> Any:
    """Returns what knows the groups; kept, since an import statement takes longer than all that a call asks it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world


def _groups() -> dict[str, dist.ProcessGroup]:
    """Returns the groups that this process belongs to, in the order in which they were made."""
    world = _world()
    names = world.pg_names
    return {names[group]: group for group in list(world.pg_map)}


def _number(group: dist.ProcessGroup) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # the stubs lack it
    except RuntimeError:
        return None


def begin_call(call: int) -> None:
    """Notes where this rank stands as a call begins."""
    numbers = {name: _number(group) for name, group in _groups().items()}
    _present.beginning = _Beginning(call, {**numbers, _GROUPS: _world().group_count})


def since_the_call(call: int | None = None) -> Numbers:
    """Tells what this rank has entered since then. Point-to-point operations count for those who take part.

    ``call``: which call is meant; a rank that has not come to it yet has entered nothing. None: the present one.
    """
    import torch.distributed as dist

    beginning = _present.beginning
    found: dict[str, tuple[tuple[int, ...], int | None]] = {}
    if call not in {None, beginning.call}:
        return found
    for name, group in _groups().items():
        now, before = _number(group), beginning.numbers.get(name) or 0
        found[name] = tuple(dist.get_process_group_ranks(group)), None if now is None else now - before
    if dist.is_initialized():  # the user may have destroyed all groups
        begun = _world().group_count - (beginning.numbers.get(_GROUPS) or 0)
        found[_GROUPS] = tuple(range(dist.get_world_size())), begun
    return found


def agree(told: Sequence[Numbers]) -> bool:
    """Tells whether all ranks, in the order of ``told``, know the same groups, and stand at the same number in each."""
    names = {name for numbers in told for name in numbers}
    return all(_same(name, told) for name in names)


def _same(name: str, told: Sequence[Numbers]) -> bool:
    """Tells whether all members know this group alike, as no other rank does."""
    found = {rank: numbers[name] for rank, numbers in enumerate(told) if name in numbers}
    members, _ = next(iter(found.values()))
    return sorted(members) == sorted(found) and len(set(found.values())) == 1


def is_lost(told: Mapping[int, Numbers], back: Collection[int]) -> bool:
    """Tells whether a rank has entered an operation that one which is ``back`` from the call never will.

    ``told``: by global rank; of some nothing may be known.
    """
    return any(
        rank != other and number is not None and _is_behind(told[rank], name, number)
        for rank in told.keys() & set(back)
        for other, numbers in told.items()
        for name, (members, number) in numbers.items()
        if rank in members
    )


def _is_behind(numbers: Numbers, name: str, number: int) -> bool:
    """Tells whether a rank has come less far in a group than one that is at ``number``."""
    _, reached = numbers.get(name, ((), 0))
    return reached is not None and reached < number


def meet(bound: torch.device | None) -> None:
    """Enters one small operation in each group, after which none before it is pending. Collective."""
    import torch
    import torch.distributed as dist

    places = {"cpu": torch.device("cpu"), **({bound.type: bound} if bound is not None else {})}
    for group in _groups().values():
        for kind in {device.type for device in group._device_types} & places.keys():
            dist.all_reduce(torch.zeros(1, device=places[kind]), group=group)
    if bound is not None and bound.type != "cpu":
        torch.accelerator.synchronize(bound)
