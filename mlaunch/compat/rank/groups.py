"""MegEngine's names for groups of ranks: its scripts port by changing an import: ``import mlaunch as dist``.

As there, most functions also work without a process group, as in a world of one.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from mlaunch.comm.rank import local_group, world
from mlaunch.compat.rank.client import Client
from mlaunch.protocol import this_rank
from mlaunch.torch_parts.process_groups import default_store

P = ParamSpec("P")
R = TypeVar("R")

_backends: list[str] = []  # of override_backend, the innermost last


class Group:
    """Some of the ranks; ``new_group`` makes one."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """For torch's collectives. RuntimeError without a process group."""
        return self._process_group or world.group()

    @property
    def ranks(self) -> list[int]:
        """The members' ranks in the world, in the group's order."""
        return dist.get_process_group_ranks(self.process_group) if is_distributed() else [0]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self.ranks.index(get_rank())

    @property
    def key(self) -> str:
        """The ranks as the key of a barrier, such as "0,1,3"."""
        return ",".join(map(str, self.ranks))

    @property
    def is_single_machine(self) -> bool:
        """True if all members are on this machine. RuntimeError if that is not known (see ``get_local_rank``)."""
        return not is_distributed() or local_group.together(self.ranks)

    def __repr__(self) -> str:
        # torch's errors about a group show its repr: so people who pass this one read there what to pass.
        return f"<Group of ranks {self.key}; torch takes its .process_group>"


WORLD = Group(None)
"""All ranks, of the present process group."""


def is_distributed() -> bool:
    """True if there is a process group."""
    return world.is_grouped()


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return world.get_rank()


def get_world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return world.get_world_size()


def get_local_device_id() -> int:
    """Return the number of this rank's device on its machine, as the rank sees it; on CPUs its local rank."""
    if is_distributed() and _accelerated():
        return torch.accelerator.current_device_index()
    return local_group.local_rank() if is_distributed() else 0


def get_backend() -> str | None:
    """Return the backend for this rank's device: "nccl", "gloo", ...; None without a process group."""
    if not is_distributed():
        return None
    offered = dict(part.split(":") for part in dist.get_backend_config(world.group()).split(","))
    accelerator = torch.accelerator.current_accelerator() if _accelerated() else None
    return offered.get(accelerator.type if accelerator else "cpu", next(iter(offered.values())))


def _accelerated() -> bool:
    """True if the world's group serves an accelerator that exists here."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and f"{accelerator.type}:" in dist.get_backend_config(world.group())


def new_group(proc_ranks: Sequence[int]) -> Group:
    """Make a group of these ranks. Collective only for them: the others need not call it.

    The order of ranks, which must be the same on all members, numbers the members: for ``Group.rank``, and for the root
    of ``bcast_list_``, which is the first.

    Raises:
        ValueError: A rank is there twice, or not in the world; this process is not a member; or the order is not
            ascending, and this torch cannot make such a group.
    """
    ranks, size = list(proc_ranks), get_world_size()
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"new_group({ranks}): allowed: different ranks from 0 to {size - 1}")
    if get_rank() not in ranks:
        raise ValueError(f"new_group({ranks}): this is rank {get_rank()}; only the group's members may call it")
    if not is_distributed():
        return WORLD
    backend = _backends[-1] if _backends else None
    return Group(world.subgroup(ranks, backend))


def group_barrier(group: Group = WORLD) -> None:
    """Return once every rank of the group has called it. Collective for the group; at once without one."""
    if is_distributed():
        dist.barrier(group=group.process_group)


def synchronized(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that every rank calls: it returns when all have finished it."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        value = func(*args, **kwargs)
        group_barrier()
        return value

    return wrapper


@contextlib.contextmanager
def override_backend(new_backend: str) -> Iterator[None]:
    """Return a context manager: groups that ``new_group`` makes inside have this backend."""
    _backends.append(new_backend)
    try:
        yield
    finally:
        _backends.pop()


def bcast_list_(inps: Iterable[torch.Tensor], group: Group = WORLD) -> None:
    """Overwrite tensors in place with those of the group's first rank. Collective; all pass tensors of equal shapes."""
    if not is_distributed():
        return
    source = group.ranks[0]
    work = [
        # Start all before waiting for one.
        dist.broadcast(tensor.detach(), source, group=group.process_group, async_op=True)
        for tensor in inps
    ]  # fmt: skip
    for pending in work:
        pending.wait()


def make_allreduce_cb(
    reduce_method: str, group: Group = WORLD
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]:
    """Return a callback that reduces a parameter's gradient over the group, in place.

    The callback takes ``(param, grad)`` and returns the gradient, as MegEngine's; or takes ``(param)`` and returns
    None, for ``param.register_post_accumulate_grad_hook``.

    Args:
        reduce_method: "mean" or "sum", in upper or lower case.

    Raises:
        ValueError: Another ``reduce_method``.
    """
    method = reduce_method.lower()
    if method not in {"mean", "sum"}:
        raise ValueError(f"reduce_method={reduce_method!r}: allowed: 'mean', 'sum'")

    def callback(param: torch.Tensor, grad: torch.Tensor | None = None) -> torch.Tensor | None:
        gradient = param.grad if grad is None else grad
        if gradient is not None and is_distributed():
            dist.all_reduce(gradient, group=group.process_group)
            if method == "mean":
                gradient /= group.size
        return grad

    return callback


def get_client() -> Client:
    """Return a client of the store that this launch's ranks share. RuntimeError without a process group."""
    world.group()
    # Ranks of other launchers share no secret: anybody who reaches their store is trusted, as torch itself does.
    secret = this_rank.this_rank.secret if this_rank.this_rank is not None else ""
    return Client(store=default_store(), secret=secret)


def get_py_server_addr() -> tuple[str, int]:
    """Return address and port of that store. RuntimeError if the launcher did not set them."""
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise RuntimeError(f"the address of the ranks' server is not known here: {error.args[0]} is not set") from None
