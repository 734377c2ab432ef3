"""The devices, backend and threads that a rank gets, and what its torch offers.

Ranks see only the devices of their launch, by the variable that hides the others of that kind: so device i is local
rank i's for every library, whichever ``devices`` were picked. Counting devices may wake a driver, after which no fork
can use it, so a process of its own does that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlaunch.protocol.server_messages import Ready
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

# By runtime, the variables that hide devices; the first that is set counts. torch calls ROCm's devices "cuda", too.
_HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
_BELOW = "ROCR_VISIBLE_DEVICES"  # hides devices from HIP itself, which counts the others from 0
_INSTANCE = "MIG-"
_OLDEST = (2, 6)  # of torch; docs/install.rst, setup.cfg and the README say it, too
_NONE_GIVEN = "privateuseone"  # torch's name of the place for a backend if there is none
_UNLIMITED_DAYS = 10_000


def usable_cpus() -> int:
    """Count the CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_of(ranks: int) -> int:
    """Return each rank's share of the usable CPUs, for parallel operations."""
    return max(1, usable_cpus() // ranks)


def visible(runtime: str, devices: Sequence[int], environ: Mapping[str, str]) -> str:
    """Return these of the visible devices as the machine names them: a value for the variable that hides others."""
    shown = [name.strip() for name in _shown(runtime, environ).split(",") if name.strip()]
    return ",".join(shown[device] if shown else str(device) for device in devices)


def instances(environ: Mapping[str, str]) -> list[str]:
    """Return the MIG instances that CUDA's variable names, of which CUDA shows a process only the first."""
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names if all(name.startswith(_INSTANCE) for name in names) else []


def seen_by(local_rank: int, visible_devices: str) -> str:
    """Return what a rank sees of its launch's devices: all, or its own MIG instance."""
    names = visible_devices.split(",")
    return names[local_rank] if names[0].startswith(_INSTANCE) else visible_devices


def _shown(runtime: str, environ: Mapping[str, str]) -> str:
    """Return the value of the variable that counts; "": all devices, by number."""
    first, *others = _HIDING.get(runtime, ("",))
    # HIP heeds its own variable before CUDA's, and both count what ROCR's leaves; torch counts in the same way.
    if first in environ or (runtime == "rocm" and _BELOW in environ):
        return environ.get(first, "")
    return next((environ[name] for name in others if name in environ), "")


def hides(runtime: str) -> bool:
    """True if this runtime has a variable that hides devices."""
    return runtime in _HIDING


def hiding(runtime: str, value: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows only these devices, and others like it that would contradict it."""
    first, *others = _HIDING[runtime]
    # CUDA's too, where it is set: some libraries refuse to start where the two differ.
    return {name: value for name in (first, *(other for other in others if other in environ))}


def choose_backend(backend: str | None, device_type: str, ready: Ready) -> str:
    """Return the backend string for ``init_process_group``. ValueError for one that this torch does not offer."""
    # A group on an accelerator gets gloo, too, for objects and CPU tensors.
    if backend is None and device_type == "cpu":
        return "gloo"
    if backend is None:
        return f"cpu:gloo,{device_type}:{ready.own_backend}" if ready.own_backend else "cpu:gloo"
    for part in backend.lower().split(","):
        if part.rpartition(":")[2] not in ready.backends:
            raise ValueError(f"backend={backend!r}: torch {ready.torch_version} offers {', '.join(ready.backends)}")
    return backend.lower()


def offered() -> Ready:
    """Return what the torch of this process offers, without waking a device. TooOldError as ``check_version``."""
    check_version()
    import torch
    import torch.distributed as dist

    present = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    plugins = [name for name in dist.Backend.backend_list if name not in {*present, "undefined"}]
    names = [name for name, there in present.items() if there] + plugins
    kind = accelerator()
    return Ready(str(torch.__version__), kind, tuple(names), _own_backend(kind, names), runtime_of(kind))


def _own_backend(kind: str | None, names: Sequence[str]) -> str | None:
    """Return torch's own backend for tensors of this kind, else gloo if that takes them; None if neither is there."""
    from torch.distributed import Backend

    # Plugins enter their backends in this map.
    wanted = (Backend.default_device_backend_map.get(kind or "", ""), "gloo")
    return next((name for name in wanted if name in names and kind in Backend.backend_capability.get(name, ())), None)


def runtime_of(kind: str | None) -> str | None:
    """Return the runtime of this kind of accelerator, whose variables hide devices."""
    import torch

    return "rocm" if kind == "cuda" and torch.version.hip else kind


def accelerator() -> str | None:
    """Return the kind of accelerator that torch was built for, or got from a plugin; leave its driver asleep."""
    import torch

    if version() >= (2, 7):
        found = torch.accelerator.current_accelerator()
        return None if found is None else found.type
    # In torch 2.6 that wakes the driver (pytorch#146098), after which no fork can use CUDA; without a device it raises.
    given = torch._C._get_privateuse1_backend_name()
    there = {given: given != _NONE_GIVEN, "cuda": torch._C._has_cuda, "xpu": torch.xpu._is_compiled()}
    return next((kind for kind, is_there in there.items() if is_there), None)


def version() -> tuple[int, int]:
    """Return torch's version, as far as anything depends on it."""
    import torch

    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def check_version() -> None:
    """Raise TooOldError for a torch that mlaunch cannot work with."""
    if version() < _OLDEST:
        import torch

        wanted = ".".join(map(str, _OLDEST))
        raise TooOldError(
            f"torch {torch.__version__} is too old for mlaunch, which needs {wanted} or later: pip install -U torch"
        )


class TooOldError(RuntimeError):
    """The installed torch is too old for mlaunch."""


def bind(spec: LaunchSpec, local_rank: int) -> torch.device:
    """Make this rank's device the current one, before any group is made (NCCL ties itself to it)."""
    import torch

    if spec.devices.type == "cpu":
        return torch.device("cpu")
    if not hides(spec.devices.type):
        index = int(spec.device(local_rank).rpartition(":")[2])
    else:
        # Each rank sees only its own MIG instance, as device 0.
        index = 0 if (spec.devices.visible or "").startswith(_INSTANCE) else local_rank
    torch.accelerator.set_device_index(index)
    return torch.device(spec.devices.type, index)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work, so that its errors belong to the function that caused them."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def share_cores(spec: LaunchSpec) -> None:
    """Give each rank its share of the cores for parallel operations, or what the user chose."""
    import torch

    chosen = spec.context.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1, and warns.
    if chosen is None:
        threads = threads_of(spec.local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for what the rank itself starts
    else:  # torch was imported before, maybe with another number; OpenMP takes one for each level of nesting
        first = chosen.partition(",")[0].strip()
        threads = int(first) if first.isdecimal() else 0  # which OpenMP would ignore, too
    if threads > 0 and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def only(local_rank: int, environ: Mapping[str, str], runtime: str | None) -> dict[str, str]:
    """Return the variable that shows a rank only its own device. ``runtime`` None: CUDA, as with torchrun.

    Raises:
        ValueError: The variable shows no device to this rank.
    """
    runtime = runtime or "cuda"
    if not hides(runtime):
        return {}
    try:
        return hiding(runtime, visible(runtime, [local_rank], environ), environ)
    except IndexError:
        name = next(name for name in _HIDING[runtime] if name in environ)
        raise ValueError(f"{name}={environ[name]} shows no device to local rank {local_rank}") from None


def limit(timeout: float | None) -> timedelta:
    """Return a timeout in seconds as torch takes it; for None, no limit, one that no job outlives."""
    from datetime import timedelta

    # timedelta.max overflows torch's nanoseconds in 64 bits.
    return timedelta(days=_UNLIMITED_DAYS) if timeout is None else timedelta(seconds=timeout)
