"""Memory on a device that the launch before has left, which the next one waits for.

A process that ends closes its files one by one, those of a lease before those of the driver. So the lease may be over
while the driver still frees the memory. Until then, NVIDIA's library (NVML) lists the process. A listed process that is
alive has its memory on purpose: that is not waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from mlaunch.base import linux
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.log import log
from mlaunch.base.text import in_bytes, ranges
from mlaunch.core.records import Need
from mlaunch.leases.caller import other_programs

# Seconds. After that it is stuck in the driver, maybe for ever, and a launch that needs less memory can run.
PATIENCE = 10.0
_EVERY = 0.05  # seconds between checks: the driver gives no notice


@frozen_record
class Remnant:
    """Memory of a process that has ended. ``size``: in bytes; None: unknown."""

    device: str
    pid: int
    size: int | None


_given_up: set[tuple[str, int]] = set()  # later trials of a sweep do not wait for these


def gone(who: str, before: Mapping[str, Mapping[str, Any]], numbers: Mapping[str, int]) -> Generator[Need, None, None]:
    """Wait for the memory of ended processes on these devices, ``PATIENCE`` seconds at most.

    ``before``: the last launch on each device, by UUID. Without the library, or if it does not answer, do not wait.
    """
    if not other_programs.is_installed():
        return
    end = time.monotonic() + PATIENCE
    with contextlib.suppress(other_programs.NoHintError), other_programs.library() as nvml:
        while found := [one for device in before for one in _left_on(nvml, device)]:
            where = f"device {ranges({numbers[one.device] for one in found}, ',')}"
            last = _names(before[device] for device in dict.fromkeys(one.device for one in found))
            if (left := end - time.monotonic()) <= 0:
                _give_up(found, who, where, last)
                return
            text = f"{who} waits for memory of {where}: {_have(found)} some (before: {last})"
            yield Need(text, timeout=min(left, _EVERY))


def _give_up(found: Sequence[Remnant], who: str, where: str, last: str) -> None:
    _given_up.update((one.device, one.pid) for one in found)
    size = sum(one.size or 0 for one in found)
    log.warning(
        "%s starts, though memory of %s is not free after %g s: %s %s (before: %s). If it runs out of memory, give it "
        "other devices; if nvidia-smi goes on to show what has ended, the driver is stuck, and the device needs a "
        "reset (nvidia-smi --gpu-reset)",
        who, where, PATIENCE, _have(found), in_bytes(size) if size else "some", last,
    )  # fmt: skip


def _left_on(nvml: Any, device: str) -> list[Remnant]:
    listed = other_programs.processes(nvml, device)
    sizes = {one.pid: one.usedGpuMemory for one in listed if (device, one.pid) not in _given_up}
    return [Remnant(device, pid, size) for pid, size in sizes.items() if linux.has_ended(pid)]


def _have(found: Sequence[Remnant]) -> str:
    pids = [str(pid) for pid in sorted({one.pid for one in found})]
    if len(pids) == 1:
        return f"process {pids[0]}, which has ended, still has"
    return f"processes {', '.join(pids)}, which have ended, still have"


def _names(before: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(f"{said.get('who') or '?'} of pid {said.get('pid', '?')}" for said in before))
