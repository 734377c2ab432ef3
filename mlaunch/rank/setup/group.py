"""Joins a process group: the one way in which a process becomes a member of its world."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank.setup import device
from mlaunch.rendezvous import name_lookup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from mlaunch.rendezvous.store_client import StoreClient

# The release of torch in which a group's destructor certainly does not hold the interpreter lock while it waits for
# threads that may wait for the lock. That of 2.6 does; others were not tried.
DESTRUCTIBLE = (2, 13)
_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")  # torch's, of groups that are made without one


@frozen_record
class Membership:
    """A process's place in the world. ``timeout`` in seconds, for each collective; None: no limit."""

    rank: int
    world_size: int
    backend: str
    timeout: float | None
    device: torch.device | None  # None, or of the CPU: the group is bound to none


def join_world(store: dist.Store, member: Membership) -> None:
    """Makes torch's default process group. Collective, over all ranks that know the store."""
    import torch.distributed as dist

    bound = member.device if member.device is not None and _serves(member.backend, member.device.type) else None
    dist.init_process_group(
        member.backend,
        store=store,
        rank=member.rank,
        world_size=member.world_size,
        timeout=device.limit(member.timeout),
        # Bound at once: NCCL then connects here and not in the first collective, whose time limit that would be.
        device_id=bound,
    )


def _serves(backend: str, device_type: str) -> bool:
    """True if a group with this backend has one of that accelerator's own, which can be bound to a device.

    gloo has no connection to a device, and torch would split each later group off it: one with NCCL raises then.
    """
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    return BackendConfig(Backend(backend)).get_device_backend_map().get(device_type, "gloo") != "gloo"


def lift_limits() -> None:
    """Gives groups that user code makes no limit, either, unless it says one."""
    import torch.distributed.distributed_c10d as dist

    # Asked for by name: which of the two there are depends on the release.
    for name in _DEFAULTS:
        if getattr(dist, name, None) is not None:
            setattr(dist, name, device.limit(None))


class HeldLimits:
    """Limits of groups, which somebody who debugs lifts for operations that begin meanwhile.

    They are asked of each group's backends, and of torch for groups to come. What has begun keeps its own.
    """

    def __init__(self) -> None:
        self._before: list[tuple[object, timedelta]] = []  # of backends
        self._to_come: dict[str, Any] = {}

    def hold(self) -> None:
        """Lifts the limits. Called by the control thread."""
        import torch.distributed.distributed_c10d as dist

        # A second request would take the lifted limits for those of before.
        if self._before or self._to_come:
            return
        self._to_come = {name: found for name in _DEFAULTS if (found := getattr(dist, name, None)) is not None}
        lift_limits()
        # A copy: the main thread may make or destroy a group meanwhile.
        for group in list(dist._world.pg_map):
            for kind in group._device_types:
                with contextlib.suppress(Exception):  # a backend that knows no limit, or a group just destroyed
                    backend = group._get_backend(kind)
                    self._before.append((backend, backend.options._timeout))
                    backend._set_default_timeout(device.limit(None))

    def give_back(self) -> None:
        """Sets them as they were."""
        import torch.distributed.distributed_c10d as dist

        for name, limit in self._to_come.items():
            setattr(dist, name, limit)
        for backend, limit in reversed(self._before):  # one may serve several kinds of devices
            with contextlib.suppress(Exception):
                backend._set_default_timeout(limit)  # type: ignore[attr-defined]
        self._before, self._to_come = [], {}


def meet_and_join(
    spec: LaunchSpec,
    local_rank: int,
    rendezvous: tuple[str, int],
    bound: torch.device | None,
    *,
    again: int = 0,
    before: int = 0,
) -> None:
    """Joins the other ranks of a launch, whose store is at ``rendezvous``. Collective.

    ``again``: a number that all ranks know, if they have left the group that they were in; each time another one.
    ``before``: that of the group that they have left.

    Raises:
        TimeoutError: Some ranks did not come; it names them.
    """
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # torch read it when the fork server imported it
    member = Membership(spec.rank(local_rank), spec.world_size, spec.backend, spec.timeout, bound)
    # Where the ranks' interface is known, no name is looked up for anything that matters.
    with name_lookup.from_files_only() if spec.interface else contextlib.nullcontext():
        client = _meet(spec, rendezvous, member, f"{spec.launch_id}/{again}")
    if again and member.rank == 0:  # all are in the new group
        client.drop(f"{spec.launch_id}/{before}")


def _meet(spec: LaunchSpec, rendezvous: tuple[str, int], member: Membership, name: str) -> StoreClient:
    from mlaunch.rendezvous.store_client import StoreClient

    client = StoreClient(*rendezvous, name, device.limit(spec.timeout))
    # So that who waits in vain can name who did not come.
    client.arrive(member.rank)
    try:
        join_world(client.store, member)
        if spec.num_nodes > 1:
            from mlaunch.collectives import local_group

            local_group.form(list(range(spec.rank_start, spec.rank_start + spec.local_world_size)))
        # gloo lets a rank go while others still greet it; one that then returned at once would break their groups.
        client.meet("mlaunch/joined", spec.world_size)
        return client
    except RuntimeError as error:
        missing = client.missing(spec.world_size) if "timeout" in str(error).lower() else ""
        if not missing:
            raise
        raise TimeoutError(f"{missing} did not come to the process group within {spec.timeout:g} s") from error
