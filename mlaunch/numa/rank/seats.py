"""The device of each rank of a machine, according to the variables that make devices visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlaunch.base.frozen_record import frozen_record
from mlaunch.numa.rank.binding import Seats
from mlaunch.numa.wire import PciDevice

_SHOWS = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
_BELOW = "ROCR_VISIBLE_DEVICES"  # makes devices visible to HIP, which counts those from 0
_ORDER = "CUDA_DEVICE_ORDER"
_INSTANCE = "MIG-"


@frozen_record
class _Named:
    """A device with its name in such a variable. A device with several MIG instances has several names."""

    name: str
    device: PciDevice


def seats_of(
    ranks: int, devices: Sequence[PciDevice], runtime: str, environ: Mapping[str, str], own: str | None
) -> Seats:
    """Return the devices of the ranks.

    Args:
        ranks: The number of ranks on this machine.
        devices: The machine's devices.
        runtime: "cuda", "rocm", "cpu", or another one, about which nothing is known here.
        environ: The caller's variables.
        own: The launch's devices as the machine names them, separated by commas; None: local rank i has device i of
            those that ``environ`` makes visible.
    """
    if runtime == "cpu":
        return Seats(ranks)
    there = [device for device in devices if device.runtime == runtime]
    if not there:
        lacks = f"where {runtime} devices are is not known here"
        return Seats(ranks) if own is None else Seats(ranks, why_not=lacks)
    below = _picked(there, environ.get(_BELOW) if runtime == "rocm" else None)
    shown = next((environ[name] for name in _SHOWS[runtime] if name in environ), None)
    pool = _picked([one.device for one in below], shown)
    theirs = pool if own is None else _picked([one.device for one in below], own)
    if own is None and not pool:
        return Seats(ranks)
    if lacks := _unordered(there, [*pool, *theirs], runtime, environ):
        return Seats(ranks, why_not=lacks)
    if any(_found(one, pool) is None for one in theirs):  # the caller makes other devices visible than its launch has
        pool = theirs
    places = [_found(theirs[rank], pool) if rank < len(theirs) else None for rank in range(ranks)]
    return Seats(ranks, [one.device for one in pool], places)


def _picked(devices: Sequence[PciDevice], shown: str | None) -> list[_Named]:
    """Return the devices that a variable makes visible: all without it, and as in CUDA none after an unknown name."""
    if shown is None:
        return [_Named(str(number), device) for number, device in enumerate(devices)]
    found = []
    for name in (part.strip() for part in shown.split(",")):
        device = _named(name, devices)
        if device is None:
            break
        found.append(_Named(name, device))
    return found


def _named(name: str, devices: Sequence[PciDevice]) -> PciDevice | None:
    if name.isdecimal():
        return devices[int(name)] if int(name) < len(devices) else None
    if not name:
        return None
    if name.startswith(f"{_INSTANCE}GPU-"):  # in older drivers: the device's UUID, and the instance's numbers
        name = name.removeprefix(_INSTANCE).partition("/")[0]
    # A UUID may be shortened if it still names one device.
    there = [device for device in devices if any(known.startswith(name) for known in device.names)]
    return there[0] if len(there) == 1 else None


def _found(one: _Named, pool: Sequence[_Named]) -> int | None:
    """Return the index of a device in ``pool``: of a MIG instance by its name, else of the device itself."""
    names = [other.name for other in pool]
    if one.name in names and one.name.startswith(_INSTANCE):
        return names.index(one.name)
    return next((place for place, other in enumerate(pool) if other.device is one.device), None)


def _unordered(
    there: Sequence[PciDevice], used: Sequence[_Named], runtime: str, environ: Mapping[str, str]
) -> str:  # fmt: skip
    """Return why the order of devices is unknown; "" if it is known. Only CUDA knows the fastest, which is first."""
    by_speed = runtime == "cuda" and environ.get(_ORDER) != "PCI_BUS_ID" and len({one.model for one in there}) > 1
    if by_speed and any(one.name.isdecimal() for one in used):
        return f"this machine's devices are of several models, which CUDA numbers by speed; set {_ORDER}=PCI_BUS_ID"
    return ""
