"""Programs without a lease on devices (other users', or without mlaunch), from NVIDIA's library (NVML).

This is a hint: such a program may start a moment later. It wakes no driver in this process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any


class NoHintError(RuntimeError):
    """The library cannot be asked."""


def is_installed() -> bool:
    """True if the package for it is installed."""
    return importlib.util.find_spec("pynvml") is not None


def idle_first(names: Sequence[str]) -> list[str]:
    """Return the devices, unused ones first; otherwise in their order. NoHintError: the library cannot be asked.

    ``names``: UUIDs, the names of devices in leases.
    """
    with library() as nvml:
        return sorted(names, key=lambda name: bool(processes(nvml, name)))


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """Open the library for a block. NoHintError: it cannot be asked, or not for what the block wants."""
    # Only in the caller: a driver that does not answer would hold up an agent, and the end of a launch.
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except _refusals(nvml) as error:
        raise NoHintError(f"NVIDIA's library says: {error}") from error


def processes(nvml: Any, name: str) -> list[Any]:
    """Return the processes on a device: ``pid``, and ``usedGpuMemory`` in bytes (None: unknown)."""
    device = nvml.nvmlDeviceGetHandleByUUID(name)
    listed = [
        *nvml.nvmlDeviceGetComputeRunningProcesses(device),
        *nvml.nvmlDeviceGetGraphicsRunningProcesses(device),
    ]
    with contextlib.suppress(AttributeError, *_refusals(nvml)):  # an older package, or driver, has no list for MPS
        listed += nvml.nvmlDeviceGetMPSComputeRunningProcesses(device)
    return listed


def _refusals(nvml: Any) -> tuple[type[Exception], ...]:
    # The second, which is no NVMLError, is raised where a driver is older than the package.
    return nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
