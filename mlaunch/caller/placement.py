"""Chooses where the ranks of this machine run: on which devices, and how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlaunch.protocol.messages import Ready
from mlaunch.rank.device import VISIBLE, usable_cpus, visible


@dataclass(frozen=True)
class Placement:
    """Where the ranks of one machine run."""

    device_type: str
    local_world_size: int
    visible_devices: str | None


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


def place_on_cpus(n_gpus: int | None, devices: Sequence[int] | None) -> Placement:
    if devices is not None:
        raise ValueError(
            f"devices={list(devices)}: ranks on CPUs have no device numbers; give n_gpus={len(devices)} instead"
        )
    return Placement("cpu", usable_cpus() if n_gpus is None else n_gpus, None)


def place_on_accelerators(
    device_type: str, n_gpus: int | None, devices: Sequence[int] | None, count: int, environ: Mapping[str, str]
) -> Placement:
    """Picks among the ``count`` visible devices. ValueError for more, or others, than there are."""
    if devices is None:
        size = count if n_gpus is None else n_gpus
        if size > count:
            raise ValueError(
                f"n_gpus={size}: only {count} {device_type} device(s) are visible here; "
                f"allowed: 1 to {count}, or device_type='cpu'"
            )
        devices = range(size)
    beyond = [device for device in devices if device >= count]
    if beyond:
        raise ValueError(
            f"devices={list(devices)}: {beyond} do not exist; the {count} visible {device_type} device(s) "
            f"are numbered 0 to {count - 1}"
        )
    return Placement(device_type, len(devices), visible(device_type, devices, environ))


def shown(device_type: str, devices: Sequence[int], count: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows these of the ``count`` visible devices. ValueError if there is none for them."""
    placement = place_on_accelerators(device_type, None, devices, count, environ)
    if device_type not in VISIBLE:
        raise ValueError(
            f"devices={list(devices)}: commands see all {device_type} devices, since no variable hides them"
        )
    return {VISIBLE[device_type]: placement.visible_devices or ""}
