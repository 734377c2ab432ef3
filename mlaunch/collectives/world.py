"""Who this process is among all ranks. Without a process group it is a world of one."""

from __future__ import annotations

import torch.distributed as dist

from mlaunch.base.text import name_ranks
from mlaunch.rendezvous.barrier import Barrier, NotAllCameError


def is_grouped() -> bool:
    """Tells whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def group() -> dist.ProcessGroup:
    """Returns the group of all ranks. RuntimeError if there is none."""
    group: dist.ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group here; call this in a rank, after init_process_group")
    return group


def get_rank() -> int:
    """Returns this process's rank; 0 without a process group."""
    return dist.get_rank() if is_grouped() else 0


def get_world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_grouped() else 1


def barrier(timeout: float) -> None:
    """Returns once every rank has called it; TimeoutError after ``timeout`` seconds, naming those that had not."""
    store, size = dist.distributed_c10d._get_default_store(), get_world_size()
    try:
        Barrier(store, "mlaunch/barrier", size).meet(str(get_rank()), timeout)
    except NotAllCameError as error:
        missing = sorted(set(range(size)) - set(map(int, error.came)))
        raise TimeoutError(f"synchronize: {name_ranks(missing)} did not come within {error.limit} s") from None
