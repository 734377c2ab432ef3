"""The process groups that this process is in, and their backends.

torch keeps them in ``_world``, under names with an underscore; it documents only the default group. If a torch has no
``_world``, only that group is known, and not whether ranks are in step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_KEPT = ("pg_map", "pg_names", "group_count")


@functools.cache
def _c10d() -> Any:
    """Return torch's module. It is cached: an import statement takes longer than all that a call reads from it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d


@functools.cache
def _world() -> Any:
    """Return torch's table of groups; None if this torch has none."""
    found = getattr(_c10d(), "_world", None)
    return found if all(hasattr(found, name) for name in _KEPT) else None


def lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    if _world() is None:
        return (
            "torch.distributed.distributed_c10d._world: groups other than the default one are not known to "
            "mlaunch why, nor destroyed by the next test, and ranks that stay are ended by a call that fails"
        )
    kind = _c10d().ProcessGroup
    if not hasattr(kind, "_device_types") or not (hasattr(kind, "get_backend") or hasattr(kind, "_get_backend")):
        return (
            "ProcessGroup._device_types: operations are not counted, mlaunch why has only stacks, and ranks that "
            "stay are ended by a call that fails"
        )
    return ""


def is_apart() -> bool:
    """True if this process is in no process group."""
    world = _world()  # directly, since each call on ranks that stay asks
    return _c10d().GroupMember.WORLD is None if world is None else not world.pg_map


def by_name() -> dict[str, dist.ProcessGroup]:
    """Return the groups that this process belongs to, in the order in which they were made."""
    world = _world()
    if world is None:
        default = _c10d().GroupMember.WORLD
        return {} if default is None else {str(default.group_name): default}
    names, ranks = world.pg_names, world.pg_group_ranks
    # A copy: another thread may make or destroy a group meanwhile. torch knows no ranks of a half-made group yet.
    return {names[group]: group for group in list(world.pg_map) if group in names and group in ranks}


def in_order() -> list[Any]:
    """Return the groups that torch knows, also one that another thread is making."""
    world = _world()
    return everyone() if world is None else list(world.pg_map)


def everyone() -> list[Any]:
    """Return all groups of this process."""
    return list(by_name().values())


def name_of(group: dist.ProcessGroup) -> str:
    """Return torch's name of a group, which all its members know."""
    world = _world()
    return str(group.group_name if world is None else world.pg_names[group])


def made() -> int | None:
    """Return how many groups were begun in the whole world, from which torch names the next one; None: not known."""
    world = _world()
    return None if world is None else int(world.group_count)


def count_on_from(number: int | None) -> None:
    """Make torch name the next group by this number."""
    world = _world()
    if world is not None and number is not None:
        world.group_count = number


def default_store() -> Any:
    """Return the store of the default group."""
    ask = getattr(_c10d(), "_get_default_store", None)
    return _c10d().GroupMember.WORLD.get_group_store() if ask is None else ask()


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store at which later subgroups of a group meet; None: not known."""
    world = _world()
    return None if world is None else world.pg_map[group][1]


def put_store(group: dist.ProcessGroup, store: Any) -> None:
    """Make later subgroups of a group meet at this store."""
    world = _world()
    world.pg_map[group] = world.pg_map[group][0], store


def devices_of(group: Any) -> list[torch.device]:
    """Return the kinds of devices for which a group has a backend; none for an object that is not a group."""
    return list(getattr(group, "_device_types", ()))


def is_group(found: Any) -> bool:
    """True for a group; False for a backend, whose methods have the same names."""
    return hasattr(found, "_device_types")


def backends(group: Any) -> list[tuple[Any, list[str]]]:
    """Return the backends of a group, each with the devices that it serves."""
    found: list[tuple[Any, list[str]]] = []
    ask = getattr(group, "get_backend", None) or getattr(group, "_get_backend", None)  # without an underscore from 2.15
    if ask is None:
        return found
    for device in getattr(group, "_device_types", ()):
        backend = ask(device)
        devices = next((kinds for known, kinds in found if known is backend), None)
        if devices is None:
            found.append((backend, [device.type]))
        else:
            devices.append(device.type)
    return found


def number_of(found: Any) -> int | None:
    """Return how many operations a group or backend has begun, by torch's count; None if it counts nothing."""
    try:
        return int(found._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def counts_messages(backend: Any) -> bool:
    """True if ``number_of`` includes messages. NCCL's backends, old and new (``nccl2``), number them separately."""
    return backend_name(backend) == "gloo"


def backend_name(backend: Any) -> str:
    """Return torch's name of a backend: "gloo", "nccl", "nccl2"."""
    return str((getattr(backend, "_get_backend_name", None) or backend.name)())
