"""The caller's part of ``numa=``: it looks up the devices once, and refuses CPUs that ranks could not have."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from mlaunch.core.parts import CallerPart, Spell
from mlaunch.numa.caller.machine_devices import devices_of
from mlaunch.numa.rank.binding import check_lists
from mlaunch.numa.wire import NumaOrder, PciDevice

if TYPE_CHECKING:
    from mlaunch.protocol.spec import LaunchSpec

ROOT = "/"


class NumaOfACall(CallerPart):
    """The binding of one call's ranks, as its options ask for it."""

    section: NumaOrder

    def __init__(self, order: NumaOrder) -> None:
        self.section = order

    def planned(self, spec: LaunchSpec) -> None:
        """Raise ValueError for lists of CPUs that ranks of this machine could not have. Ranks elsewhere do it there."""
        if spec.context.environ:  # otherwise machines of an engine have their own
            check_lists(self.section, spec.local_world_size, self.section.allowed)


def part(options: Any, spell: Spell) -> NumaOfACall:
    """Make the caller's part."""
    mode, memory = options.numa, options.numa_memory
    asked = spell("numa", mode)
    asked += f", {spell('numa_memory', memory)}" if memory else ""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    order = NumaOrder(mode, memory, asked, devices_here(ROOT), allowed, ROOT)
    return NumaOfACall(order)


@functools.cache
def devices_here(root: str) -> tuple[PciDevice, ...]:
    """Return this machine's devices, which do not change while a process runs."""
    return devices_of(root)
