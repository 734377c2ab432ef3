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
    with _library() as nvml:
        return sorted(names, key=lambda name: _is_used(nvml, name))


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    # Asked by the caller: a driver that does not answer would hold up an agent, and with it the end of a launch.
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NoHintError(f"NVIDIA's library says: {error}") from error


def _is_used(nvml: Any, name: str) -> bool:
    device = nvml.nvmlDeviceGetHandleByUUID(name)
    return bool(nvml.nvmlDeviceGetComputeRunningProcesses(device) or nvml.nvmlDeviceGetGraphicsRunningProcesses(device))
