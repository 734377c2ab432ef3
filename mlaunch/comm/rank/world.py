"""This process among all ranks, and among those of its machine; without a process group, a world of one."""

from __future__ import annotations

import inspect
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlaunch.base.text import name_ranks
from mlaunch.rendezvous.store_client import Barrier, NotAllCameError
from mlaunch.torch_parts import process_groups


def is_grouped() -> bool:
    """True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def group() -> dist.ProcessGroup:
    """Return the group of all ranks. RuntimeError if there is none."""
    group: dist.ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group here; call this in a rank, after init_process_group")
    return group


def subgroup(ranks: list[int], backend: str | None) -> dist.ProcessGroup:
    """Make a group of these ranks, counted within it in the order given. Collective for them alone.

    Raises:
        ValueError: This torch counts them in ascending order, and another is given.
    """
    ordered: dict[str, Any] = {}
    if ranks != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise ValueError(f"torch {torch.__version__} forms groups of ascending ranks; allowed: {sorted(ranks)}")
        ordered["sort_ranks"] = False
    # use_local_synchronization: members alone take part, as the other ranks need not call it.
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True, **ordered)
    return made


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if is_grouped() else 0


def get_world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_grouped() else 1


def barrier(timeout: float) -> None:
    """Return once every rank has called it; TimeoutError after ``timeout`` seconds, naming those that had not."""
    store, size = process_groups.default_store(), get_world_size()
    try:
        Barrier(store, "mlaunch/barrier", size).meet(str(get_rank()), timeout)
    except NotAllCameError as error:
        missing = sorted(set(range(size)) - set(map(int, error.came)))
        raise TimeoutError(f"synchronize: {name_ranks(missing)} did not come within {error.limit} s") from None


# The ranks that share a machine


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
    made = made_group()
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
    return int(said) if made_group() is None and said is not None else local().rank


def local_group() -> dist.ProcessGroup:
    """Return the group of this machine's ranks. RuntimeError if there is none yet."""
    everyone, made = group(), made_group()
    if made is not None:
        return made
    if local().size == dist.get_world_size():
        return everyone
    raise RuntimeError(
        f"the group of this machine's {local().size} ranks was not made; "
        f"have all ranks call create_local_process_group() first"
    )


def form(ranks: list[int]) -> dist.ProcessGroup:
    """Make the group of these ranks, which share a machine. None of them may end before all have it.

    Collective only for these ranks, while those of all other machines do the same: all ranks must take part in a group
    that is split from the world's (NCCL), each with its own machine's ranks.
    """
    made = subgroup(ranks, None)
    _made[:] = [_Made(group(), made)]
    return made


def together(ranks: list[int]) -> bool:
    """True if these ranks, this one among them, are all on this machine."""
    here = local()
    if here.size == dist.get_world_size():
        return True
    made = made_group()
    if made is not None:
        return set(ranks) <= set(dist.get_process_group_ranks(made))
    first = dist.get_rank() - here.rank  # launchers number a machine's ranks in sequence
    return all(first <= rank < first + here.size for rank in ranks)


def made_group() -> dist.ProcessGroup | None:
    """Return the group of this machine's ranks that was made; None if there is none, or its world is gone."""
    # By identity: a new world may be of other ranks.
    return _made[0].group if _made and _made[0].world is dist.group.WORLD else None


def equal_machines(per_machine: int) -> list[list[int]]:
    """Return the ranks of each machine if all have this many. ValueError if that is impossible."""
    size = dist.get_world_size()
    if per_machine < 1 or size % per_machine:
        raise ValueError(
            f"num_workers_per_machine={per_machine}: the world has {size} ranks, which is no multiple of it; "
            f"allowed: a divisor, or None to have the ranks find out"
        )
    return [list(range(start, start + per_machine)) for start in range(0, size, per_machine)]


def name_of_machine() -> str:
    """Return a name of this machine, the same in all of its processes and in no others."""
    if "GROUP_RANK" in os.environ:  # the launcher counted them
        return os.environ["GROUP_RANK"]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text(encoding="utf-8") if boot.exists() else "")
