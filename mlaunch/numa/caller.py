"""The caller's part of ``numa=``: it finds the machine's devices, and refuses CPUs that ranks could not have.

Devices are found without opening a driver in this process. Those that it may not use are left out, as CUDA does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaunch.core.parts import CallerPart, Spell
from mlaunch.numa.rank import check_lists
from mlaunch.numa.wire import NumaOrder, PciDevice

if TYPE_CHECKING:
    from mlaunch.protocol.spec import LaunchSpec


ROOT = "/"
_NVIDIA = "0x10de"
_SHOWS, _COMPUTES = "0x0300", "0x0302"  # classes of PCI devices: VGA and 3D controllers
_KEYS = ("vendor", "class", "device")
_INSTANCES = "proc/driver/nvidia/capabilities/gpu*/mig/gi*"
Load = Callable[[str], Any]


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


def devices_of(root: str = "/", load: Load = importlib.import_module) -> tuple[PciDevice, ...]:
    """Return a machine's devices, in the order of their runtime.

    ``root``: where /proc, /sys and /dev are; ``load``: imports NVIDIA's library.
    """
    return (*_nvidias(Path(root), load), *_amds(Path(root)))


def _nvidias(root: Path, load: Load) -> list[PciDevice]:
    found = list(_in_proc(root))
    # NVML takes longer, but only NVML knows MIG instances. The driver gives a device's UUID once it has been used.
    if not found or not all(device.names for device in found) or any(root.glob(_INSTANCES)):
        found = _by_nvml(load) or found
    return found or list(_in_sys(root))


def _in_proc(root: Path) -> Iterator[PciDevice]:
    """Yield the devices that NVIDIA's driver lists in /proc."""
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*:*"), key=lambda path: _place(path.name)):
        with contextlib.suppress(OSError):
            lines = (path / "information").read_text(encoding="utf-8", errors="replace").splitlines()
            told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            # Also false if a cgroup forbids the device, as Slurm's do with other jobs' devices.
            if os.access(root / f"dev/nvidia{told.get('Device Minor', '0')}", os.R_OK | os.W_OK):
                uuid = told.get("GPU UUID", "?")
                yield PciDevice("cuda", path.name, () if "?" in uuid else (uuid,), told.get("Model", ""))


def _by_nvml(load: Load) -> list[PciDevice]:
    """Return the devices that NVIDIA's library lists (extra ``nvidia``); [] without it, or if it fails."""
    try:
        nvml = load("pynvml")
    except ImportError:
        return []
    found = []
    try:
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):  # this process may not use it
                    found.append(_of_handle(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return []
    return sorted(found, key=lambda device: _place(device.address))


def _of_handle(nvml: Any, handle: object) -> PciDevice:
    bus = nvml.nvmlDeviceGetPciInfo(handle)
    names = [_text(nvml.nvmlDeviceGetUUID(handle))]
    with contextlib.suppress(nvml.NVMLError):  # it has no instances
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):
                names.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
    address = f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}.0"
    return PciDevice("cuda", address, tuple(names), _text(nvml.nvmlDeviceGetName(handle)))


def _text(told: str | bytes) -> str:
    """Return a text of the library as a string; older versions return bytes."""
    return told.decode() if isinstance(told, bytes) else told


def _in_sys(root: Path) -> Iterator[PciDevice]:
    """Yield NVIDIA's devices as the kernel knows them, without UUIDs."""
    for path in sorted((root / "sys/bus/pci/devices").glob("*:*"), key=lambda path: _place(path.name)):
        with contextlib.suppress(OSError):
            vendor, kind, model = ((path / name).read_text(encoding="ascii").strip() for name in _KEYS)
            if vendor == _NVIDIA and kind.startswith((_SHOWS, _COMPUTES)):
                yield PciDevice("cuda", path.name, (), model)


def _amds(root: Path) -> Iterator[PciDevice]:
    """Yield AMD's devices in the order of the kernel's compute driver, which is also HIP's."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for path in sorted(nodes, key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, ValueError):
            lines = (path / "properties").read_text(encoding="ascii").splitlines()
            told = {name: int(value) for name, value in map(str.split, lines)}
            usable = os.access(root / f"dev/dri/renderD{told.get('drm_render_minor', 0)}", os.R_OK | os.W_OK)
            if told.get("simd_count") and usable:  # CPUs have none
                yield _of_properties(told)


def _of_properties(told: dict[str, int]) -> PciDevice:
    place = told["location_id"]
    address = f"{told.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    name = (f"GPU-{told['unique_id']:016x}",) if told.get("unique_id") else ()
    return PciDevice("rocm", address, name, str(told.get("device_id", "")))


def _place(address: str) -> tuple[int, ...]:
    """Return a PCI address as numbers. They sort in the order of CUDA and NVML."""
    return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))
