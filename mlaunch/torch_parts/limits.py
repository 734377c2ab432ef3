"""The time limits of process groups: of those to come, and of those that there are.

torch documents ``set_timeout`` from 2.14 on. Before, some backends have ``_set_default_timeout``, which NCCL's new one
has not. Which limit a group has, no documented name says. Where a torch has neither, limits stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mlaunch.torch_parts import lacking, process_groups

_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")  # torch's, of groups that are made without one


def lacks() -> str:
    """Return what this torch has not, and what follows; "" if it has all."""
    from torch.distributed import distributed_c10d

    if not any(hasattr(distributed_c10d, name) for name in _DEFAULTS):
        return "default_pg_timeout: collectives keep their time limits while somebody debugs; give a longer timeout="
    kinds = [vars(distributed_c10d).get(name) for name in ("Backend", "ProcessGroupGloo", "ProcessGroupNCCL")]
    kinds += [getattr(distributed_c10d, "ProcessGroup", None)]
    if not any(hasattr(kind, name) for kind in kinds for name in ("set_timeout", "_set_default_timeout")):
        return _NEITHER
    return ""


_NEITHER = (
    "Backend.set_timeout, nor _set_default_timeout: limits of groups that are there stay while somebody debugs; give a "
    "longer timeout="
)


def lift(limit: timedelta) -> None:
    """Give groups to come this limit, unless they are made with one."""
    import torch.distributed.distributed_c10d as dist

    # Asked for by name: which of the two there are depends on the release.
    for name in _DEFAULTS:
        if getattr(dist, name, None) is not None:
            setattr(dist, name, limit)


class HeldLimits:
    """Limits of groups, which somebody who debugs lifts for operations that begin meanwhile.

    They are asked of each group's backends, and of torch for groups to come. What has begun keeps its own.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Callable[[timedelta], object], timedelta]] = []  # of backends
        self._to_come: dict[str, Any] = {}

    def hold(self, limit: timedelta) -> None:
        """Put ``limit`` in the place of all. Called by the control thread."""
        import torch.distributed.distributed_c10d as dist

        # A second request would take the lifted limits for those of before.
        if self._before or self._to_come:
            return
        self._to_come = {name: found for name in _DEFAULTS if (found := getattr(dist, name, None)) is not None}
        lift(limit)
        for group in process_groups.everyone():
            with contextlib.suppress(Exception):  # a group just destroyed
                for backend, _ in process_groups.backends(group):
                    self._hold_one(backend, limit)

    def _hold_one(self, backend: Any, limit: timedelta) -> None:
        put = getattr(backend, "set_timeout", None) or getattr(backend, "_set_default_timeout", None)
        if put is None:
            lacking.tell(_NEITHER)
            return
        with contextlib.suppress(Exception):  # a backend that knows no limit
            before = backend.options._timeout
            put(limit)
            self._before.append((put, before))

    def give_back(self) -> None:
        """Set them as they were."""
        import torch.distributed.distributed_c10d as dist

        for name, limit in self._to_come.items():
            setattr(dist, name, limit)
        for put, limit in reversed(self._before):
            with contextlib.suppress(Exception):
                put(limit)
        self._before, self._to_come = [], {}
