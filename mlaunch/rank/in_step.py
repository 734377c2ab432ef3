"""Whether this rank is in step with the others: the operations that it has entered, in each process group.

A rank that comes back from a call early leaves the others in an operation that it never entered. From then on every
operation would meet another one's partner. torch numbers the operations of each group, on each rank: where the numbers
of all members agree, everybody has entered what the others have. It counts the groups, too, and names the next one by
that, so a rank that was called back while it made one would wait for the others under another name.

Messages are another matter. As many sent here as there says nothing of who has received them: one that is left would be
taken for the next. So a call that fails after it has begun to send or receive leaves its ranks out of step.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages.launch_messages import Operations
from mlaunch.rank.operations import begun_messages, numbers_of, told

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# By group and backend: its members, and the operations since the call began; None where nobody can tell.
Numbers = Mapping[str, tuple[tuple[int, ...], int | None]]
# Among them, as if these were the names of some, and all ranks their members:
GROUPS = "groups"  # those of the whole world that were begun
MESSAGES = "messages"  # None once one was begun


@frozen_record
class _Beginning:
    """Where this rank stood as a call began."""

    call: int = 0  # its number
    numbers: Mapping[str, int | None] = field(default_factory=dict)
    messages: int = 0  # that were begun


@dataclass
class _Present:
    """``beginning`` is exchanged as one, since a thread reads it."""

    beginning: _Beginning = field(default_factory=_Beginning)


_present = _Present()


@functools.cache
def _world() -> Any:
    """Returns what knows the groups; kept, since an import statement takes longer than all that a call asks it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world


def is_apart() -> bool:
    """Tells whether this rank is in no process group, since the function has destroyed it."""
    return _world().default_pg is None


def _groups() -> dict[str, dist.ProcessGroup]:
    """Returns the groups that this process belongs to, in the order in which they were made."""
    world = _world()
    names = world.pg_names
    return {names[group]: group for group in list(world.pg_map)}


def begin_call(call: int) -> None:
    """Notes where this rank stands as a call begins."""
    numbers = {part: number for name, group in _groups().items() for part, number, _ in numbers_of(name, group)}
    _present.beginning = _Beginning(call, {**numbers, GROUPS: _world().group_count}, begun_messages())


def since_the_call(call: int | None = None) -> Numbers:
    """Tells what this rank has entered since then.

    ``call``: which call is meant; a rank that has not come to it yet has entered nothing. None: the present one.
    """
    import torch.distributed as dist

    # Read once: the main thread may begin the next call meanwhile.
    beginning = _present.beginning
    found: dict[str, tuple[tuple[int, ...], int | None]] = {}
    if call not in {None, beginning.call}:
        return found
    for name, group in _groups().items():
        members = tuple(dist.get_process_group_ranks(group))
        for part, now, _ in numbers_of(name, group):
            found[part] = members, None if now is None else now - (beginning.numbers.get(part) or 0)
    if dist.is_initialized():  # the user may have destroyed all groups
        everyone = tuple(range(dist.get_world_size()))
        found[GROUPS] = everyone, _world().group_count - (beginning.numbers.get(GROUPS) or 0)
        found[MESSAGES] = everyone, None if begun_messages() > beginning.messages else 0
    return found


def entered() -> Operations:
    """Returns what this rank has begun in each group, and what its threads wait for."""
    return told(_groups(), _world().group_count)


def agree(told: Sequence[Numbers]) -> bool:
    """Tells whether all ranks, in the order of ``told``, know the same groups, and stand at the same number in each."""
    names = {name for numbers in told for name in numbers}
    return all(_same(name, told) for name in names)


def _same(name: str, told: Sequence[Numbers]) -> bool:
    """Tells whether all members know this group alike, as no other rank does; one alone cannot be out of step."""
    found = {rank: numbers[name] for rank, numbers in enumerate(told) if name in numbers}
    members, number = next(iter(found.values()))
    alike = sorted(members) == sorted(found) and len(set(found.values())) == 1
    return alike and (number is not None or len(members) == 1)


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
