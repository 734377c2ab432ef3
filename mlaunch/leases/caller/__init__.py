"""A call's way to its devices: its request for a lease, and its options once it has them.

It also waits for memory that ended launches have left on a device, and names other programs there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlaunch.base import linux
from mlaunch.base.exceptions import misuse
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.log import log
from mlaunch.base.text import in_bytes, ranges
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.launch import plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.core.records import Grant, Need
from mlaunch.leases.caller.acquisition import Acquisition, DeviceLease, Wish
from mlaunch.leases.caller.lease_directory import place
from mlaunch.rank import device

VARIABLE = "MLAUNCH_LEASED"  # in ranks: devices of their launch, and of the launches around it
_PLACE = "place on the CPUs"
# Seconds. After that it is stuck in the driver, maybe for ever, and a launch that needs less memory can run.
PATIENCE = 10.0
_EVERY = 0.05  # seconds between checks: the driver gives no notice
_given_up: set[tuple[str, int]] = set()  # memory of ended processes for which later trials of a sweep do not wait


@frozen_record
class LeaseRequest:
    """A request of a launch.

    ``numbers``: of the devices, by name; None: a place on the CPUs. ``runtime``: of the devices ("cuda", "rocm").
    """

    options: Options
    environ: Mapping[str, str]
    wish: Wish
    numbers: Mapping[str, int] | None
    runtime: str = ""

    def begin(self) -> Acquisition:
        """Join the queue. OSError where there can be no leases."""
        return Acquisition(place(os.environ), self.wish)

    def step(self, acquisition: Acquisition) -> DeviceLease | None:
        """Return the lease; None: it is not our turn, or too few are free."""
        if self.options.lease == "idle" and self.numbers is not None:
            try:
                # Each time: idle devices change while the launch waits.
                acquisition.prefer(idle_first(self.wish.names))
            except NoHintError as error:
                log.warning("%s takes any devices that are free, idle or not: %s", self.wish.who, error)
        return acquisition.step()

    def memory_back(self, lease: DeviceLease) -> Generator[Need, None, None]:
        """Wait until the driver shows no memory of the launches that had these devices before."""
        if self.runtime == "cuda" and self.numbers is not None and lease.before:
            yield from gone(self.wish.who, lease.before, self.numbers)

    def granted(self, lease: DeviceLease) -> Grant:
        """Return the launch's options and environment with these devices."""
        changes: dict[str, Any] = {"lease": False, "concurrent": None}
        if self.numbers is not None:
            chosen = [self.numbers[name] for name in lease.names]
            changes |= {"devices": chosen, "n_gpus": len(chosen)}
        held = ",".join([*held_around(self.environ), *lease.names])
        environ = {**self.environ, VARIABLE: held}
        return Grant(self.options.replaced(changes), environ, (VARIABLE,), tuple(lease.fds), lease.close)

    def waits_for(self, acquisition: Acquisition) -> str:
        """Return "train() waits for 2 of devices 0-7, after search() (pid 7)"."""
        wanted = "a place on the CPUs"
        if self.numbers is not None:
            wanted = f"{self.wish.count} of devices {ranges(sorted(self.numbers.values()), ',')}"
        return f"{self.wish.who} waits for {wanted}, after {acquisition.waits_for()}"


def held_around(environ: Mapping[str, str]) -> list[str]:
    """Return the devices of the launch that this process is a rank of."""
    return [name for name in environ.get(VARIABLE, "").split(",") if name]


def request_of(options: Options, server: ForkServer, environ: Mapping[str, str], name: str) -> LeaseRequest:
    """Return the request of a launch. Errors are raised as if from the line of the call.

    Raises:
        ValueError: This machine does not have these devices.
        RuntimeError: This process is a rank of the launch that holds them.
    """
    try:
        numbers, names, count = _wanted(options, server, environ)
    except ValueError as error:
        raise misuse(error) from None
    ours = set(held_around(environ))
    left = [one for one in names if one not in ours]
    if len(left) < count:
        raise misuse(
            RuntimeError(
                f"{name} would deadlock: it wants {count} of {', '.join(names)}, and the launch that it runs inside "
                f"holds {', '.join(one for one in names if one in ours)} until this rank returns. Launch it without "
                f"a lease, or on other devices"
            )
        )
    ready = server.ready()
    runtime = ready.runtime or ready.accelerator or ""
    return LeaseRequest(options, environ, Wish(left, count, name, held_around(environ)), numbers, runtime)


def _wanted(
    options: Options, server: ForkServer, environ: Mapping[str, str]
) -> tuple[Mapping[str, int] | None, Sequence[str], int]:
    """Return the devices' numbers by name, the suitable names, and how many of them are wanted."""
    kind = plan.choose_type(options.device_type, server.ready())
    # By name: a number means another device under another CUDA_VISIBLE_DEVICES.
    names = server.name_devices(environ) if kind != "cpu" else ()
    if kind == "cpu" or (options.device_type == "auto" and not names):
        size = plan.place_on_cpus(options.n_gpus, options.devices).local_world_size
        places = options.concurrent or max(1, device.usable_cpus() // size)
        if options.concurrent is None:
            _warn_of_cpus(size, device.usable_cpus())
        return None, [f"{_PLACE} {number}" for number in range(places)], 1
    if options.concurrent is not None:
        raise ValueError(
            f"concurrent={options.concurrent} on {kind} devices: the number of devices limits how many launches "
            f"run at a time; allowed: None, or device_type='cpu'"
        )
    if options.lease == "idle":
        _check_hint(kind, server)
    numbers = options.devices or range(len(names))
    count = options.n_gpus or len(numbers)
    runtime = server.ready().runtime or kind
    accelerator = plan.Accelerator(kind, runtime, len(names))
    plan.place_on_accelerators(accelerator, None, numbers, environ)
    if count > len(numbers):  # not of those that were given, so of all
        plan.place_on_accelerators(accelerator, count, None, environ)
    by_name = {names[number]: number for number in numbers}
    return by_name, list(by_name), count


@functools.cache  # once for each size
def _warn_of_cpus(size: int, cpus: int) -> None:
    if size > cpus:
        log.warning(
            "a lease for %d ranks on %d CPU%s: only one such launch runs at a time, and its ranks share the CPUs",
            size, cpus, "s" * (cpus > 1),
        )  # fmt: skip


def _check_hint(kind: str, server: ForkServer) -> None:
    """Raise an error if ``lease="idle"`` cannot be provided."""
    if (server.ready().runtime or kind) != "cuda":
        raise ValueError(
            f"lease='idle' on {kind} devices: NVIDIA's library knows only NVIDIA devices; allowed: lease=True"
        )
    if not is_installed():
        raise misuse(
            ModuleNotFoundError(
                "lease='idle' asks NVIDIA's library by the package nvidia-ml-py, which is not installed here; install "
                "it (extra: nvidia), or give lease=True, which takes any devices that no other launch has"
            )
        )


class DevicesOfACall(CallerPart):
    """The lease of a call on devices of this machine."""

    def acquire(self, grant: Grant, server: ForkServer, name: str) -> Generator[Need, None, Grant]:
        """Wait until it is this call's turn and enough devices are free; then for their memory."""
        request = request_of(grant.options, server, grant.environ, name)
        yield Need(row=tuple(request.wish.names))
        acquisition = request.begin()
        try:
            while (lease := request.step(acquisition)) is None:
                yield Need(request.waits_for(acquisition), acquisition.fds(), acquisition.timeout())
        finally:
            acquisition.close()
        try:
            yield from request.memory_back(lease)
        except BaseException:
            lease.close()
            raise
        return request.granted(lease)


def part(_options: Options, _spell: Spell) -> DevicesOfACall:
    """Make the caller's part."""
    return DevicesOfACall()


# Programs without a lease on devices (other users', or without mlaunch), from NVIDIA's library (NVML)


class NoHintError(RuntimeError):
    """The library cannot be asked."""


def is_installed() -> bool:
    """True if the package for it is installed."""
    return importlib.util.find_spec("pynvml") is not None


def idle_first(names: Sequence[str]) -> list[str]:
    """Return the devices, unused ones first; otherwise in their order. NoHintError: the library cannot be asked.

    ``names``: UUIDs, the names of devices in leases.
    """
    with library() as nvml:
        return sorted(names, key=lambda name: bool(processes(nvml, name)))


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """Open the library for a block. NoHintError: it cannot be asked, or not for what the block wants."""
    # Only in the caller: a driver that does not answer would hold up an agent, and the end of a launch.
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
    """Return the processes on a device: ``pid``, and ``usedGpuMemory`` in bytes (None: unknown)."""
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


# Memory on a device that the launch before has left, which the next one waits for


@frozen_record
class Remnant:
    """Memory of a process that has ended. ``size``: in bytes; None: unknown."""

    device: str
    pid: int
    size: int | None


def gone(who: str, before: Mapping[str, Mapping[str, Any]], numbers: Mapping[str, int]) -> Generator[Need, None, None]:
    """Wait for the memory of ended processes on these devices, ``PATIENCE`` seconds at most.

    ``before``: the last launch on each device, by UUID. Without the library, or if it does not answer, do not wait.
    """
    if not is_installed():
        return
    end = time.monotonic() + PATIENCE
    with contextlib.suppress(NoHintError), library() as nvml:
        while found := [one for device in before for one in _left_on(nvml, device)]:
            where = f"device {ranges({numbers[one.device] for one in found}, ',')}"
            last = _names(before[device] for device in dict.fromkeys(one.device for one in found))
            if (left := end - time.monotonic()) <= 0:
                _give_up(found, who, where, last)
                return
            text = f"{who} waits for memory of {where}: {_have(found)} some (before: {last})"
            yield Need(text, timeout=min(left, _EVERY))


def _give_up(found: Sequence[Remnant], who: str, where: str, last: str) -> None:
    _given_up.update((one.device, one.pid) for one in found)
    size = sum(one.size or 0 for one in found)
    log.warning(
        "%s starts, though memory of %s is not free after %g s: %s %s (before: %s). If it runs out of memory, give it "
        "other devices; if nvidia-smi still shows a process that has ended, the driver is stuck, and the device needs "
        "a reset (nvidia-smi --gpu-reset)",
        who, where, PATIENCE, _have(found), in_bytes(size) if size else "some", last,
    )  # fmt: skip


def _left_on(nvml: Any, device: str) -> list[Remnant]:
    listed = processes(nvml, device)
    sizes = {one.pid: one.usedGpuMemory for one in listed if (device, one.pid) not in _given_up}
    return [Remnant(device, pid, size) for pid, size in sizes.items() if linux.has_ended(pid)]


def _have(found: Sequence[Remnant]) -> str:
    pids = [str(pid) for pid in sorted({one.pid for one in found})]
    if len(pids) == 1:
        return f"process {pids[0]}, which has ended, still has"
    return f"processes {', '.join(pids)}, which have ended, still have"


def _names(before: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(f"{said.get('who') or '?'} of pid {said.get('pid', '?')}" for said in before))
