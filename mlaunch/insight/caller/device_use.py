"""How much memory of a device is in use, and how busy it is, as NVIDIA's library tells; others do not tell.

The library (package nvidia-ml-py, extra ``nvidia``) asks the driver, and opens nothing on the device. It is loaded by
who looks, never in a rank or its agent, which a driver that does not answer would hold up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_KIND = "cuda"


class DeviceUse:
    """Looks at devices of this machine. ``load``: imports the package."""

    def __init__(self, load: Callable[[str], Any] = importlib.import_module) -> None:
        self._load = load
        self._library: Any = None
        self._tried = False

    def of(self, device: str) -> tuple[int, int, int | None] | None:
        """Return bytes in use, bytes in all and percent (None: not told) of a device such as "cuda:2".

        By number as ``nvidia-smi`` counts, or by UUID, "cuda:GPU-...". None if it does not tell.
        """
        kind, _, name = device.partition(":")
        nvml = self._opened() if kind == _KIND and name else None
        if nvml is None:
            return None
        try:
            by_number = name.isdigit()
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            return None
        return int(memory.used), int(memory.total), _percent(nvml, handle)

    def _opened(self) -> Any:
        """Return the library, None without it or without a driver."""
        if not self._tried:
            self._tried = True
            try:
                library = self._load("pynvml")
            except ImportError:
                return None
            try:
                library.nvmlInit()
                self._library = library
            except library.NVMLError:
                return None
        return self._library


def _percent(nvml: Any, handle: object) -> int | None:
    """Return in how much of the time a kernel ran; None of what does not tell, such as a MIG instance."""
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None
