"""The process groups that this process is in: their backends, time limits, and what torch's flight recorder has.

torch keeps groups in ``_world``, under names with an underscore; it documents only the default group. If a torch has no
``_world``, only that group is known, and not whether ranks are in step.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

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


# Time limits, of future groups and of existing ones. torch documents ``set_timeout`` from 2.14 on. Before that, some
# backends have ``_set_default_timeout``; NCCL's new one does not. No documented name tells which limit a group has. If
# a torch has neither function, limits stay as they are.

_LIMITS_OF_NEW = ("default_pg_timeout", "default_pg_nccl_timeout")  # torch's, for groups that are made without a limit
_NO_LIMITS = (
    "Backend.set_timeout, nor _set_default_timeout: groups that exist keep their time limits while somebody debugs; "
    "give a longer timeout="
)


def limits_lack() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    from torch.distributed import distributed_c10d

    if not any(hasattr(distributed_c10d, name) for name in _LIMITS_OF_NEW):
        return "default_pg_timeout: collectives keep their time limits while somebody debugs; give a longer timeout="
    kinds = [vars(distributed_c10d).get(name) for name in ("Backend", "ProcessGroupGloo", "ProcessGroupNCCL")]
    kinds += [getattr(distributed_c10d, "ProcessGroup", None)]
    if not any(hasattr(kind, name) for kind in kinds for name in ("set_timeout", "_set_default_timeout")):
        return _NO_LIMITS
    return ""


def lift_limits(limit: timedelta) -> None:
    """Set the limit of future groups that are made without one."""
    import torch.distributed.distributed_c10d as dist

    # By name: which of the two exist depends on the release.
    for name in _LIMITS_OF_NEW:
        if getattr(dist, name, None) is not None:
            setattr(dist, name, limit)


class HeldLimits:
    """The limits of groups, which are raised during debugging for operations that begin meanwhile.

    They are set on each group's backends, and in torch for future groups. Operations that have begun keep their limits.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Callable[[timedelta], object], timedelta]] = []  # of backends
        self._to_come: dict[str, Any] = {}

    def hold(self, limit: timedelta) -> None:
        """Replace all limits by ``limit``. Called by the control thread."""
        import torch.distributed.distributed_c10d as dist

        # A second request would take the raised limits for the original ones.
        if self._before or self._to_come:
            return
        self._to_come = {name: found for name in _LIMITS_OF_NEW if (found := getattr(dist, name, None)) is not None}
        lift_limits(limit)
        for group in everyone():
            with contextlib.suppress(Exception):  # the group was just destroyed
                for backend, _ in backends(group):
                    self._hold_one(backend, limit)

    def _hold_one(self, backend: Any, limit: timedelta) -> None:
        put = getattr(backend, "set_timeout", None) or getattr(backend, "_set_default_timeout", None)
        if put is None:
            from mlaunch.torch_parts import lacking

            lacking.tell(_NO_LIMITS)
            return
        with contextlib.suppress(Exception):  # the backend has no limit
            before = backend.options._timeout
            put(limit)
            self._before.append((put, before))

    def give_back(self) -> None:
        """Restore the limits from before ``hold``."""
        import torch.distributed.distributed_c10d as dist

        for name, limit in self._to_come.items():
            setattr(dist, name, limit)
        for put, limit in reversed(self._before):
            with contextlib.suppress(Exception):
                put(limit)
        self._before, self._to_come = [], {}


# torch's flight recorder: the number of collectives that were begun and that their device has not completed. NCCL
# returns before the device has done anything, so all ranks may have begun the same operations while one device is
# behind. NCCL's old backend fills the recorder by itself; for others torch does, from 2.15 on. gloo's is not read: a
# thread waits for each operation that gloo has not completed. ``TORCH_FR_BUFFER_SIZE=0`` switches the recorder off.

_OF_OLD_NCCL = "_dump_nccl_trace_json"
_OF_ANY = "_dump_fr_trace_json"
_COMPLETED = "completed"


def recorder_lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    from torch._C import _distributed_c10d as c10d

    if hasattr(c10d, _OF_ANY) or hasattr(c10d, _OF_OLD_NCCL):
        return ""
    return f"{_OF_ANY}: mlaunch why does not say which device is behind in what all ranks have begun"


def pending_of(name: str, group: Any) -> dict[str, int]:
    """Return how many collectives of a group are not completed, by the kind of device.

    Backends without a recorder are left out.
    """
    found = {}
    for backend, devices in backends(group):
        kind = backend_name(backend)
        record = None if kind == "gloo" else _read_recorder(kind)
        if record is not None:
            device = "cpu" if "cpu" in devices else devices[0]
            found[device] = sum(_is_pending(entry, name) for entry in record)
    return found


def _read_recorder(kind: str) -> list[dict[str, Any]] | None:
    """Return the entries that are not completed; None if no recorder is known to be this backend's."""
    from torch._C import _distributed_c10d as c10d

    try:
        if kind == "nccl":
            text = getattr(c10d, _OF_OLD_NCCL)(includeCollectives=True, onlyActive=True)
        else:
            text = getattr(c10d, _OF_ANY)(includeCollectives=True, onlyActive=True, backend=kind)
        found: list[dict[str, Any]] = json.loads(text).get("entries", [])
    except (AttributeError, TypeError, ValueError, RuntimeError):  # older releases know no backend=
        return None
    return found


def _is_pending(entry: dict[str, Any], name: str) -> bool:
    is_over = entry.get("retired") or entry.get("state") == _COMPLETED
    return not (is_over or entry.get("is_p2p")) and entry.get("process_group", [""])[0] == name
