"""The process group: the one way in which a process becomes a member of its world."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlaunch.base.frozen_record import frozen_record
from mlaunch.core import load
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import device
from mlaunch.rendezvous import tcp_store

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from mlaunch.rendezvous.store_client import StoreClient

# The oldest torch that is known to destruct a group without holding the interpreter lock while it waits for threads
# that may wait for the lock. 2.6 holds it; those in between were not tried.
DESTRUCTIBLE = (2, 13)


@frozen_record
class Membership:
    """A process's place in the world. ``timeout`` in seconds, for each collective; None: no limit."""

    rank: int
    world_size: int
    backend: str
    timeout: float | None
    device: torch.device | None  # None, or of the CPU: the group is bound to none


def join_world(store: dist.Store, member: Membership) -> None:
    """Make torch's default process group. Collective, over all ranks that know the store."""
    import torch.distributed as dist

    bound = member.device if member.device is not None and _serves(member.backend, member.device.type) else None
    dist.init_process_group(
        member.backend,
        store=store,
        rank=member.rank,
        world_size=member.world_size,
        timeout=device.limit(member.timeout),
        # Bound at once: NCCL then connects here, and not within the time limit of the first collective.
        device_id=bound,
    )


def _serves(backend: str, device_type: str) -> bool:
    """True if a group with this backend has one of that accelerator's own, which can be bound to a device.

    gloo has no connection to a device, and torch would split each later group off it: one with NCCL raises then.
    """
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    return BackendConfig(Backend(backend)).get_device_backend_map().get(device_type, "gloo") != "gloo"


def lift_limits() -> None:
    """Give groups that user code makes no time limit, either, unless it sets one."""
    from mlaunch.torch_parts import process_groups

    process_groups.lift_limits(device.limit(None))


def meet_and_join(
    spec: LaunchSpec,
    local_rank: int,
    rendezvous: tuple[str, int],
    bound: torch.device | None,
    *,
    again: int = 0,
    before: int = 0,
) -> None:
    """Join the other ranks of a launch, whose store is at ``rendezvous``. Collective.

    ``again``: to join after the group was left: a number that all ranks know, each time another one. ``before``: the
    number of the group that was left.

    Raises:
        TimeoutError: Some ranks did not come; the error names them.
    """
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # torch read it when the fork server imported it
    member = Membership(spec.rank(local_rank), spec.world_size, spec.devices.backend, spec.timeout, bound)
    # Where the ranks' interface is known, no name is looked up for anything that matters.
    with tcp_store.from_files_only() if spec.nodes.interface else contextlib.nullcontext():
        client = _meet(spec, rendezvous, member, f"{spec.launch_id}/{again}")
    if again and member.rank == 0:  # all are in the new group
        client.drop(f"{spec.launch_id}/{before}")


def _meet(spec: LaunchSpec, rendezvous: tuple[str, int], member: Membership, name: str) -> StoreClient:
    from mlaunch.rendezvous.store_client import StoreClient

    client = StoreClient(*rendezvous, name, device.limit(spec.timeout))
    client.arrive(member.rank)  # so that the others can name the ranks that did not come
    try:
        join_world(client.store, member)
        comm = load.at_hand("comm", "rank.world") if spec.nodes.count > 1 else None
        if comm is not None:
            comm.form(list(range(spec.rank_start, spec.rank_start + spec.local_world_size)))
        # gloo returns from here while others still connect; a rank that ended at once would break their groups.
        client.meet("mlaunch/joined", spec.world_size)
        return client
    except RuntimeError as error:
        missing = client.missing(spec.world_size) if "timeout" in str(error).lower() else ""
        if not missing:
            raise
        raise TimeoutError(f"{missing} did not come to the process group within {spec.timeout:g} s") from error
