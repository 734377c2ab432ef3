"""Which devices, backend and threads a rank gets.

Ranks see only the devices of their launch, through the variable with which each kind of device hides the others, so
device i is local rank i's for every library, whichever ``devices`` were picked. Counting devices may wake a driver,
after which no fork can use it, so it is done in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mlaunch.protocol.messages import Ready
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    import torch

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_UNLIMITED = timedelta(days=10_000)


@dataclass(frozen=True)
class Placement:
    """Where the ranks of one machine run."""

    device_type: str
    local_size: int
    visible_devices: str | None


def choose_type(device_type: str, ready: Ready) -> str:
    """``device_type`` with "auto" resolved to what torch was built for. ValueError if torch lacks it."""
    offered = [ready.accelerator, "cpu"] if ready.accelerator else ["cpu"]
    if device_type == "auto":
        return offered[0] or "cpu"
    if device_type not in offered:
        raise ValueError(
            f"device_type={device_type!r}: torch {ready.torch_version} has no such device; "
            f"allowed: {', '.join(repr(name) for name in ['auto', *offered])}"
        )
    return device_type


def usable_cpus() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_of(ranks: int) -> int:
    """Each rank's share of those CPUs, for parallel operations."""
    return max(1, usable_cpus() // ranks)


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
    return Placement(device_type, len(devices), _visible(device_type, devices, environ))


def _visible(device_type: str, devices: Sequence[int], environ: Mapping[str, str]) -> str | None:
    variable = _VISIBLE.get(device_type)
    if variable is None:
        return None
    shown = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    return ",".join(shown[device] if shown else str(device) for device in devices)


def choose_backend(backend: str | None, device_type: str, ready: Ready) -> str:
    """The backend string for ``init_process_group``. ValueError for one that this torch does not offer."""
    default = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}.get(device_type)
    if backend is None:
        return f"cpu:gloo,{device_type}:{default}" if default else "gloo"
    for part in backend.lower().split(","):
        if part.rpartition(":")[2] not in ready.backends:
            raise ValueError(f"backend={backend!r}: torch {ready.torch_version} offers {', '.join(ready.backends)}")
    return backend.lower()


def offered() -> Ready:
    """What the torch of this process offers. Wakes no device."""
    import torch
    import torch.distributed as dist

    # Asking without a check for presence tells what torch was built for, and leaves the driver asleep.
    accelerator = torch.accelerator.current_accelerator()
    present = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    plugins = [name for name in dist.Backend.backend_list if name not in {*present, "undefined"}]
    names = [name for name, there in present.items() if there] + plugins
    return Ready(str(torch.__version__), accelerator.type if accelerator else None, tuple(names))


def count() -> int:
    """The visible accelerators. Wakes the driver: only in a process that ends afterwards."""
    import torch

    return torch.accelerator.device_count()


def bind(spec: LaunchSpec, local_rank: int) -> torch.device:
    """Makes this rank's device the current one, before any group is made (NCCL ties itself to it)."""
    import torch

    if spec.device_type == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(spec.device_type, local_rank)


def synchronize(device: torch.device) -> None:
    """Waits for the device's queued work, so that its errors belong to the function that caused them."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def share_cores(spec: LaunchSpec) -> None:
    """Gives each rank its share of the cores for parallel operations, unless the user chose."""
    import torch

    if "OMP_NUM_THREADS" not in spec.context.environ:
        threads = threads_of(spec.local_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for what the rank itself starts
        torch.set_num_threads(threads)


def environment(spec: LaunchSpec, local_rank: int, address: str, port: int) -> dict[str, str]:
    """The variables by which torch and the libraries on it know a rank, named and valued as torchrun's."""
    machine = {
        "LOCAL_WORLD_SIZE": spec.local_size,
        "WORLD_SIZE": spec.world_size,
        "ROLE_WORLD_SIZE": spec.world_size,
        "GROUP_RANK": spec.group_rank,
        "GROUP_WORLD_SIZE": spec.group_size,
        "NODE_RANK": spec.group_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": spec.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.launch_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    rank = {"RANK": spec.rank(local_rank), "ROLE_RANK": spec.rank(local_rank), "LOCAL_RANK": local_rank}
    rank["MLAUNCH_RANK_PID"] = os.getpid()  # whose RANK it is: what a rank starts inherits these, but is no rank
    return {**dict(spec.context.environ), **_defaults(spec), **_strings({**machine, **rank})}


def _strings(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _defaults(spec: LaunchSpec) -> dict[str, str]:
    environ = spec.context.environ
    chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if spec.interface:
        chosen["GLOO_SOCKET_IFNAME"] = spec.interface
    if spec.interface and spec.group_size > 1:
        chosen["NCCL_SOCKET_IFNAME"] = spec.interface
    found = {name: value for name, value in chosen.items() if name not in environ}
    if spec.visible_devices is not None:
        found[_VISIBLE[spec.device_type]] = spec.visible_devices
    return found


def shown(device_type: str, devices: Sequence[int], count: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows these of the ``count`` visible devices alone. ValueError for others than there are."""
    placement = place_on_accelerators(device_type, None, devices, count, environ)
    return {} if placement.visible_devices is None else {_VISIBLE[device_type]: placement.visible_devices}


def only(local_rank: int, environ: Mapping[str, str], accelerator: str | None) -> dict[str, str]:
    """The variable that leaves a rank its own device alone, of kind ``accelerator`` (None: CUDA, as torchrun).

    Raises:
        ValueError: The variable shows fewer devices than that.
    """
    variable = _VISIBLE.get(accelerator or "cuda")
    if variable is None:
        return {}
    try:
        return {variable: _visible(accelerator or "cuda", [local_rank], environ) or ""}
    except IndexError:
        raise ValueError(f"{variable}={environ[variable]} shows no device to local rank {local_rank}") from None


def limit(timeout: float | None) -> timedelta:
    """A timeout in seconds as torch takes it; None, no limit, as one that no job outlives."""
    return _UNLIMITED if timeout is None else timedelta(seconds=timeout)
