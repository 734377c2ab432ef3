"""How much memory of a device is in use, and how busy it is, as NVIDIA's library tells; others do not tell.

The library asks the driver, and opens nothing on the device. It is loaded by who looks, never in a rank or its agent,
which a driver that does not answer would hold up.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_KIND = "cuda"


class _MemoryInfo(ctypes.Structure):
    """Bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilisation(ctypes.Structure):
    """Percent of the time in which a kernel ran, and memory was read or written."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class DeviceUse:
    """Looks at devices of this machine. ``load``: opens the library."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._load = load
        self._library: Any = None
        self._tried = False

    def of(self, device: str) -> tuple[int, int, int | None] | None:
        """Returns bytes in use, bytes in all and percent (None: not told) of a device such as "cuda:2".

        By number as ``nvidia-smi`` counts, or by UUID, "cuda:GPU-...". None if it does not tell.
        """
        kind, _, name = device.partition(":")
        library = self._opened() if kind == _KIND and name else None
        if library is None:
            return None
        handle, memory, use = ctypes.c_void_p(), _MemoryInfo(), _Utilisation()
        if name.isdigit():
            failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if failed or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        told = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0
        return int(memory.used), int(memory.total), int(use.gpu) if told else None

    def _opened(self) -> Any:
        """Returns the library, None without it or without a driver."""
        if not self._tried:
            self._tried = True
            try:
                library = self._load(_LIBRARY)
                self._library = library if library.nvmlInit_v2() == 0 else None
            except OSError:
                self._library = None
        return self._library
