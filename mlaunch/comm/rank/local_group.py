"""The ranks that share a machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mlaunch.comm.rank import exchange, world


@dataclass(frozen=True)
class Local:
    """A rank's place on its machine."""

    rank: int
    size: int


@dataclass
class _Made:
    """The group of this machine's ranks, and the world in which it was made."""

    world: dist.ProcessGroup
    group: dist.ProcessGroup


_made: list[_Made] = []  # one, or none


def local() -> Local:
    """Return this rank's place: in the group that was made, or as the launcher said; RuntimeError if neither says."""
    made = _current()
    if made is not None:
        return Local(dist.get_rank(made), dist.get_world_size(made))
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return Local(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    if dist.get_world_size() == 1:
        return Local(0, 1)
    raise RuntimeError(
        "this process does not know which ranks share a machine: the launcher set no LOCAL_RANK and LOCAL_WORLD_SIZE; "
        "have all ranks call create_local_process_group() first"
    )


def local_rank() -> int:
    """Return ``local().rank``, also if the launcher gave only that."""
    said = os.environ.get("LOCAL_RANK")
    return int(said) if _current() is None and said is not None else local().rank


def group() -> dist.ProcessGroup:
    """Return the group of this machine's ranks. RuntimeError if there is none yet."""
    everyone, made = world.group(), _current()
    if made is not None:
        return made
    if local().size == dist.get_world_size():
        return everyone
    raise RuntimeError(
        f"the group of this machine's {local().size} ranks was not made; "
        f"have all ranks call create_local_process_group() first"
    )


def make(per_machine: int | None) -> None:
    """Make each machine's group. Collective."""
    if _current() is not None:
        return
    groups = _by_place() if per_machine is None else _by_number(per_machine)
    made = form(next(ranks for ranks in groups if dist.get_rank() in ranks))
    # gloo lets a rank go while others still greet it; one that ended then would break their group.
    exchange.gather_everywhere(None, made, "create_local_process_group()")


def form(ranks: list[int]) -> dist.ProcessGroup:
    """Make the group of these ranks, which share a machine. None of them may end before all have it.

    Collective only for these ranks, while those of all other machines do the same: all ranks must take part in a group
    that is split from the world's (NCCL), each with its own machine's ranks.
    """
    made = world.subgroup(ranks, None)
    _made[:] = [_Made(world.group(), made)]
    return made


def together(ranks: list[int]) -> bool:
    """True if these ranks, this one among them, are all on this machine."""
    here = local()
    if here.size == dist.get_world_size():
        return True
    made = _current()
    if made is not None:
        return set(ranks) <= set(dist.get_process_group_ranks(made))
    first = dist.get_rank() - here.rank  # launchers number a machine's ranks in sequence
    return all(first <= rank < first + here.size for rank in ranks)


def _current() -> dist.ProcessGroup | None:
    """Return the group, unless the world in which it was made is gone."""
    # By identity: a world that was made anew may be of other ranks.
    return _made[0].group if _made and _made[0].world is dist.group.WORLD else None


def _by_number(per_machine: int) -> list[list[int]]:
    size = dist.get_world_size()
    if per_machine < 1 or size % per_machine:
        raise ValueError(
            f"num_workers_per_machine={per_machine}: the world has {size} ranks, which is no multiple of it; "
            f"allowed: a divisor, or None to have the ranks find out"
        )
    return [list(range(start, start + per_machine)) for start in range(0, size, per_machine)]


def _by_place() -> list[list[int]]:
    places = exchange.gather_everywhere(_place(), None, "create_local_process_group()")
    return [[rank for rank, place in enumerate(places) if place == here] for here in dict.fromkeys(places)]


def _place() -> str:
    """Return a name of this machine, the same in all of its processes and in no others."""
    if "GROUP_RANK" in os.environ:  # the launcher counted them
        return os.environ["GROUP_RANK"]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text(encoding="utf-8") if boot.exists() else "")
