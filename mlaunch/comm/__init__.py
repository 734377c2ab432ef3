"""Functions for code inside a rank: get its number, wait for the others, exchange objects, average numbers.

The names and arguments are those of detectron2's ``utils.comm``. Where the behaviour is better than the original's, the
docstring says so. Works in ranks of mlaunch, of torchrun, in any process group, and without one (a world of one).

Every rank of the group must call *collective* functions, in the same order. Otherwise the ranks that call wait for the
others until the group's timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mlaunch.comm.rank import exchange, reduction, world

T = TypeVar("T")
K = TypeVar("K")

_SEEDS = 2**31


def get_world_size() -> int:
    """Return the number of ranks; 1 without a process group. Not collective."""
    return world.get_world_size()


def get_rank() -> int:
    """Return this process's rank; 0 without a process group. Not collective."""
    return world.get_rank()


def get_local_rank() -> int:
    """Return this process's rank among those of its machine; 0 without a process group. Not collective.

    Raises:
        RuntimeError: The launcher did not say (no ``LOCAL_RANK``), and ``create_local_process_group`` was not called.
    """
    return world.local_rank() if world.is_grouped() else 0


def get_local_size() -> int:
    """Return the number of ranks on this machine; 1 without a process group. Not collective.

    Raises:
        RuntimeError: As ``get_local_rank``.
    """
    return world.local().size if world.is_grouped() else 1


def is_main_process() -> bool:
    """True if this is rank 0. Not collective."""
    return get_rank() == 0


def create_local_process_group(num_workers_per_machine: int | None = None) -> None:
    """Make the group of each machine's ranks. Collective; each rank gets its own machine's. A second call does nothing.

    Ranks of mlaunch need it only on several machines, where ``mlaunch.launch`` calls it.

    Args:
        num_workers_per_machine: Ranks per machine, if all have the same number (ranks are then taken in this order).
            None: the ranks tell each other where they are, so machines may differ.

    Raises:
        ValueError: The world size is not a multiple of ``num_workers_per_machine``. On every rank.
    """
    if not world.is_grouped() or world.made_group() is not None:
        return
    what = "create_local_process_group()"
    if num_workers_per_machine is None:
        names = exchange.gather_everywhere(world.name_of_machine(), None, what)
        machines = [[rank for rank, name in enumerate(names) if name == here] for here in dict.fromkeys(names)]
    else:
        machines = world.equal_machines(num_workers_per_machine)
    made = world.form(next(ranks for ranks in machines if get_rank() in ranks))
    # With gloo a rank may leave while others still greet it; one that ended then would break their group.
    exchange.gather_everywhere(None, made, what)


def get_local_process_group() -> dist.ProcessGroup:
    """Return the group of this machine's ranks, for torch's collectives. Not collective.

    Raises:
        RuntimeError: It was not made (``create_local_process_group``), and the ranks are not all on one machine.
    """
    return world.local_group()


def synchronize(timeout: float | None = None) -> None:
    """Return once every rank has called it; at once in a world of one. Collective.

    Args:
        timeout: Seconds, after which the ranks that did come raise. None: the process group's own timeout.

    Raises:
        TimeoutError: ``timeout`` passed; it names the ranks that had not come.
    """
    if get_world_size() == 1:
        return
    if timeout is not None:
        world.barrier(timeout)
    elif dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.accelerator.current_device_index()])
    else:
        dist.barrier()


def all_gather(data: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, by rank, on every rank. Collective for ``group`` (None: all ranks).

    Objects are sent over the CPU, each at its own size; tensors of an accelerator arrive on the CPU. A rank's own place
    in the list holds the same object that it passed.

    Raises:
        TypeError: A rank passed an object that cannot be pickled. Raised on every rank.
    """
    return [data] if _alone(group) else exchange.gather_everywhere(data, group, "all_gather()")


def gather(data: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather as ``all_gather`` does; rank ``dst`` (counted within ``group``) gets the list, the others get ``[]``.

    Raises:
        ValueError: ``group`` has no rank ``dst``.
        TypeError: A rank passed an object that cannot be pickled. Raised on every rank.
    """
    _check_rank("dst", dst, group)
    return [data] if _alone(group) else exchange.gather_at(data, dst, group, "gather()")


def broadcast_object(data: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the object of rank ``src`` (counted within ``group``), on every rank. Collective for ``group``.

    The objects of the other ranks are ignored.

    Raises:
        ValueError: ``group`` has no rank ``src``.
        TypeError: The object cannot be pickled. Raised on every rank.
    """
    _check_rank("src", src, group)
    return data if _alone(group) else exchange.broadcast(data, src, group, "broadcast_object()")


def shared_random_seed() -> int:
    """Draw a random number from 0 to 2**31 - 1, the same on every rank. Collective.

    Each rank draws from torch's default CPU generator, and rank 0's draw counts: with that generator seeded, it is
    reproducible.
    """
    drawn = int(torch.randint(_SEEDS, ()).item())
    return broadcast_object(drawn)


def reduce_dict(input_dict: Mapping[K, Any], average: bool = True) -> dict[K, Any]:
    """Return the mean (or sum) over all ranks of each value, on every rank (the original: only on rank 0).

    Collective. A new dictionary with the same keys in the same order; the input is not changed.

    Args:
        input_dict: Tensors (any shape, CPU or accelerator), Python's numbers and numpy's. All ranks need the same keys
            and shapes.
        average: False: the sum.

    Returns:
        A value of the same kind for each. A tensor gives a tensor of its shape, device and dtype, a number of numpy's
        one of its type. Sums of integers are exact. Means of integers are floats (of torch's default dtype for a
        tensor), sums of booleans integers. Where a rank has an integer and another a float, both get a float.

    Raises:
        ValueError: The ranks' keys, shapes or devices differ. On every rank.
        TypeError: A value is neither tensor nor number. On every rank.
        OverflowError: A sum does not fit into its tensor's or numpy's type of integers, or a Python int into 64 bits.
    """
    return reduction.reduce_dict(input_dict, average=average)


def all_reduce_mean(value: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the mean of every rank's number, on every rank. Collective for ``group`` (None: all ranks)."""
    if _alone(group):
        return float(value)
    link = exchange.cpu_group(group)
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total, group=link)
    return total.item() / dist.get_world_size(link)


@contextlib.contextmanager
def main_process_first() -> Iterator[bool]:
    """Run the block on rank 0 first, and on the other ranks once it has ended. Collective.

    Use it for data that is prepared once and then found in a cache: a download, a tokenised data set. The value of the
    ``with`` statement is True on rank 0.

    Raises:
        RuntimeError: (on the other ranks) The block failed on rank 0, which raises the block's own exception.
    """
    with _first_in(None if world.is_grouped() else _NOBODY, "main_process_first()") as first:
        yield first


@contextlib.contextmanager
def once_per_machine() -> Iterator[bool]:
    """Run the block on the first rank of each machine first, as ``main_process_first`` does. Collective.

    Raises:
        RuntimeError: The block failed on the machine's first rank; or as ``get_local_process_group``.
    """
    with _first_in(world.local_group() if world.is_grouped() else _NOBODY, "once_per_machine()") as first:
        yield first


_NOBODY: Any = object()  # instead of a group: there is none


@contextlib.contextmanager
def _first_in(group: dist.ProcessGroup | None, what: str) -> Iterator[bool]:
    if group is _NOBODY or _alone(group):
        yield True
        return
    if dist.get_rank(group) == 0:
        try:
            yield True
        except BaseException as error:
            exchange.broadcast(f"{type(error).__name__}: {error}", 0, group, what)
            raise
        exchange.broadcast("", 0, group, what)
        return
    failed = exchange.broadcast("", 0, group, what)
    if failed:
        first = dist.get_global_rank(group or world.group(), 0)
        raise RuntimeError(f"{what}: the block failed on rank {first}, which goes first: {failed}")
    yield False


def _alone(group: dist.ProcessGroup | None) -> bool:
    return not world.is_grouped() or dist.get_world_size(group) == 1


def _check_rank(name: str, rank: int, group: dist.ProcessGroup | None) -> None:
    size = dist.get_world_size(group) if world.is_grouped() else 1
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank}: the group has {size} rank(s); allowed: 0 to {size - 1}")
