"""The time limits of process groups: of future groups, and of existing ones.

torch documents ``set_timeout`` from 2.14 on. Before that, some backends have ``_set_default_timeout``; NCCL's new one
does not. No documented name tells which limit a group has. If a torch has neither function, limits stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mlaunch.torch_parts import lacking, process_groups

_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")  # torch's, for groups that are made without a limit


def lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    from torch.distributed import distributed_c10d

    if not any(hasattr(distributed_c10d, name) for name in _DEFAULTS):
        return "default_pg_timeout: collectives keep their time limits while somebody debugs; give a longer timeout="
    kinds = [vars(distributed_c10d).get(name) for name in ("Backend", "ProcessGroupGloo", "ProcessGroupNCCL")]
    kinds += [getattr(distributed_c10d, "ProcessGroup", None)]
    if not any(hasattr(kind, name) for kind in kinds for name in ("set_timeout", "_set_default_timeout")):
        return _NEITHER
    return ""


_NEITHER = (
    "Backend.set_timeout, nor _set_default_timeout: groups that exist keep their time limits while somebody debugs; "
    "give a longer timeout="
)


def lift(limit: timedelta) -> None:
    """Set the limit of future groups that are made without one."""
    import torch.distributed.distributed_c10d as dist

    # By name: which of the two exist depends on the release.
    for name in _DEFAULTS:
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
        self._to_come = {name: found for name in _DEFAULTS if (found := getattr(dist, name, None)) is not None}
        lift(limit)
        for group in process_groups.everyone():
            with contextlib.suppress(Exception):  # the group was just destroyed
                for backend, _ in process_groups.backends(group):
                    self._hold_one(backend, limit)

    def _hold_one(self, backend: Any, limit: timedelta) -> None:
        put = getattr(backend, "set_timeout", None) or getattr(backend, "_set_default_timeout", None)
        if put is None:
            lacking.tell(_NEITHER)
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
