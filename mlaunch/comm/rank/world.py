"""This process among all ranks; without a process group, a world of one."""

from __future__ import annotations

import inspect
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
