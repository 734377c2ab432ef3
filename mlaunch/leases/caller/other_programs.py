"""Asks NVIDIA's library (NVML) on which devices programs run that have no lease: other users', or without mlaunch.

What it tells is a hint: nothing keeps such a program from starting a moment later. It wakes no driver for this process.
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
    """Tells whether there is a package to ask it with."""
    return importlib.util.find_spec("pynvml") is not None


def idle_first(names: Sequence[str]) -> list[str]:
    """Returns the devices, those first that no process uses; else in their order. NoHintError: it cannot be asked.

    ``names``: UUIDs, as ``leases`` know devices.
    """
    with library() as nvml:
        return sorted(names, key=lambda name: bool(processes(nvml, name)))


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """Open it, and close it again. NoHintError: it cannot be asked, or not what the block asks."""
    # Asked by the caller: a driver that does not answer would hold up an agent, and with it the end of a launch.
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
    """Return those that the driver lists on a device: ``pid``, and ``usedGpuMemory`` in bytes (None: not told)."""
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
