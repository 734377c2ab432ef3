"""Chooses where the ranks of this machine run: on which devices, and how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.server_messages import Ready
from mlaunch.rank.setup import device

_FEW, _MOST_PER_CPU = 64, 8  # ranks on CPUs that nobody has to confirm


@frozen_record
class DeviceChoice:
    """Where the ranks of one machine run."""

    device_type: str
    local_world_size: int
    visible_devices: str | None


@frozen_record
class Accelerator:
    """What a machine has of one kind. ``runtime``: whose variables hide devices; ``count``: how many are visible."""

    kind: str
    runtime: str
    count: int


def choose_type(device_type: str, ready: Ready) -> str:
    """Resolves "auto" to what torch was built for. ValueError for a ``device_type`` that torch lacks."""
    offered = [ready.accelerator, "cpu"] if ready.accelerator else ["cpu"]
    if device_type == "auto":
        return offered[0] or "cpu"
    if device_type not in offered:
        raise ValueError(
            f"device_type={device_type!r}: torch {ready.torch_version} has no such device; "
            f"allowed: {', '.join(repr(name) for name in ['auto', *offered])}"
        )
    return device_type


def check_share(ranks: int, cpus: int) -> None:
    """Raise ValueError for so many ranks that the number is a typing error, most likely."""
    most = max(_FEW, _MOST_PER_CPU * cpus)
    if ranks > most:
        raise ValueError(
            f"n_gpus={ranks} (--nproc-per-node) on {cpus} CPU(s): more than {_FEW} ranks, and more than "
            f"{_MOST_PER_CPU} for each CPU; allowed: up to {most}, or oversubscribe=True (--oversubscribe) if so many "
            f"are meant"
        )


def place_on_cpus(n_gpus: int | None, devices: Sequence[int] | None) -> DeviceChoice:
    if devices is not None:
        size = len(devices) if n_gpus is None else n_gpus
        raise ValueError(f"devices={list(devices)}: ranks on CPUs have no device numbers; give n_gpus={size} instead")
    return DeviceChoice("cpu", device.usable_cpus() if n_gpus is None else n_gpus, None)


def place_on_accelerators(
    accelerator: Accelerator, n_gpus: int | None, devices: Sequence[int] | None, environ: Mapping[str, str]
) -> DeviceChoice:
    """Picks among the visible devices. ValueError for more, or others, than there are."""
    kind, count = accelerator.kind, accelerator.count
    if devices is None:
        size = count if n_gpus is None else n_gpus
        if size > count:
            raise ValueError(
                f"n_gpus={size}: only {count} {kind} device(s) are visible here; "
                f"allowed: 1 to {count}, or device_type='cpu'"
            )
        devices = range(size)
    beyond = [number for number in devices if number >= count]
    if beyond:
        raise ValueError(
            f"devices={list(devices)}: {beyond} do not exist; the {count} visible {kind} device(s) "
            f"are numbered 0 to {count - 1}"
        )
    return DeviceChoice(kind, len(devices), device.visible(accelerator.runtime, devices, environ))


def shown(accelerator: Accelerator, devices: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows these of the visible devices. ValueError if there is none for them."""
    placement = place_on_accelerators(accelerator, None, devices, environ)
    if not device.hides(accelerator.runtime):
        raise ValueError(
            f"devices={list(devices)}: commands see all {accelerator.kind} devices, since no variable hides them"
        )
    return device.hiding(accelerator.runtime, placement.visible_devices or "", environ)
