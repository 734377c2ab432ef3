"""The plan of a launch: from options to a launch that this machine can serve."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import current_process
from typing import TYPE_CHECKING

from mlaunch.base import linux, own_process
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.log import log
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report import notebook
from mlaunch.core import load
from mlaunch.protocol.server_messages import Ready
from mlaunch.protocol.settings import of_this_process
from mlaunch.protocol.spec import CallFacts, Context, LaunchSpec, RankDevices, Restarts, new_launch_id
from mlaunch.rank import device

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts

_FEW, _MOST_PER_CPU = 64, 8  # ranks on CPUs that the user need not confirm


@frozen_record
class ThisMachine:
    """The facts about this machine for a launch. ``count`` returns how many accelerators an environment shows."""

    ready: Ready
    count: Callable[[Mapping[str, str]], int]


@frozen_record
class Attempt:
    """The facts that differ between the attempts of a call.

    ``time_left``: seconds of its deadline, None: it has none. ``parts``: of the features that the call asks for; None:
    of none.
    """

    restart_count: int
    time_left: float | None
    parts: CallerParts | None = None


def plan(options: Options, machine: ThisMachine, name: str, environ: Mapping[str, str], attempt: Attempt) -> LaunchSpec:
    """Return the launch that the options ask for on this machine. ValueError for what it does not have."""
    placed = place(options, machine, environ)
    world_size = options.world_size or placed.local_world_size
    _check_world(options, placed, world_size)
    # A warning and no error: the figure was measured with one torch, and a launch may get by with less.
    if lacks := own_process.too_few_files(placed.local_world_size):
        log.warning("%s: %s", name, lacks)
    cluster = None
    if world_size > placed.local_world_size:
        cluster = load.room("machines", "caller", f"world_size={world_size}").rendezvous(options, environ, name)
    backend = device.choose_backend(options.backend, placed.device_type, machine.ready)
    devices = RankDevices(placed.device_type, placed.visible_devices, backend)
    spec = spec_of(
        options, name, attempt, placed.local_world_size, devices, context_of(environ), machine.ready.torch_version
    )
    return dataclasses.replace(
        spec,
        world_size=world_size,
        rank_start=options.rank_start,
        port=options.port,
        secret=spec.secret if cluster is None else cluster.token or "",
        cluster=cluster,
    )


def spec_of(
    options: Options,
    name: str,
    attempt: Attempt,
    size: int,
    devices: RankDevices,
    context: Context,
    torch_version: str,
) -> LaunchSpec:
    """Return an attempt at a launch of ``size`` ranks on one machine, as the options ask for it."""
    return LaunchSpec(
        launch_id=new_launch_id(),
        call=CallFacts(name, options.deadline, attempt.time_left, options.seed, options.results == "rank0"),
        local_world_size=size,
        world_size=size,
        rank_start=0,
        devices=devices,
        timeout=options.timeout_seconds,
        grace_period=options.grace_period,
        restarts=Restarts(attempt.restart_count, options.max_restarts),
        port=0,
        torch_version=torch_version,
        secret=os.urandom(16).hex(),
        context=context,
        sections={} if attempt.parts is None else attempt.parts.sections,
    )


def _check_world(options: Options, placed: DeviceChoice, world_size: int) -> None:
    here = placed.local_world_size
    if placed.device_type == "cpu" and not options.oversubscribe:
        check_share(here, device.usable_cpus())
    if options.rank_start + here > world_size:
        raise ValueError(
            f"world_size={world_size} with {here} rank(s) on this machine from rank_start={options.rank_start}: "
            f"allowed: {options.rank_start + here} or more, or None for only this machine"
        )
    if world_size > here and options.port == 0:
        raise ValueError(
            f"world_size={world_size} with {here} rank(s) on this machine: the others are on machines that have to "
            f"find each other; give port= (1 to 65535), master_ip= and rank_start=, or engine= instead"
        )


def context_of(environ: Mapping[str, str]) -> Context:
    """Return this process's surroundings as they are now, with this environment."""
    cwd = linux.working_directory()
    main = sys.modules.get("__main__")
    main_file = getattr(main, "__file__", None)
    main_name = getattr(getattr(main, "__spec__", None), "name", None)
    argv = tuple(getattr(sys, "argv", ()))
    authkey = bytes(current_process().authkey)
    # Ranks have the key as this process's children do: a Manager of multiprocessing, passed as an argument, works
    # there.
    own = of_this_process(), notebook.source(), authkey
    return Context(dict(environ), cwd, tuple(sys.path), argv, main_file, main_name, os.getpid(), *own)


def place(options: Options, machine: ThisMachine, environ: Mapping[str, str]) -> DeviceChoice:
    """Return where the ranks of this machine run. ValueError for what it does not have."""
    device_type = choose_type(options.device_type, machine.ready)
    available = machine.count(environ) if device_type != "cpu" else 0
    if device_type == "cpu" or (options.device_type == "auto" and available == 0):
        return place_on_cpus(options.n_gpus, options.devices)
    accelerator = Accelerator(device_type, machine.ready.runtime or device_type, available)
    return place_on_accelerators(accelerator, options.n_gpus, options.devices, environ)


# Where the ranks of this machine run: on which devices, and how many


@frozen_record
class DeviceChoice:
    """The place of one machine's ranks."""

    device_type: str
    local_world_size: int
    visible_devices: str | None


@frozen_record
class Accelerator:
    """The accelerators of one kind in a machine. ``runtime``: its variables hide devices; ``count``: visible ones."""

    kind: str
    runtime: str
    count: int


def choose_type(device_type: str, ready: Ready) -> str:
    """Resolve "auto" to the type that torch was built for. ValueError for a ``device_type`` that torch lacks."""
    offered = [ready.accelerator, "cpu"] if ready.accelerator else ["cpu"]
    if device_type == "auto":
        return offered[0] or "cpu"
    if device_type not in offered:
        built_for = f"{ready.accelerator} and CPUs" if ready.accelerator else "CPUs"
        raise ValueError(
            f"device_type={device_type!r}: torch {ready.torch_version} is built for {built_for} only; "
            f"allowed: {', '.join(repr(name) for name in ['auto', *offered])}"
        )
    return device_type


def check_share(ranks: int, cpus: int) -> None:
    """Raise ValueError if there are so many ranks that the number is probably a typing error."""
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
    """Pick devices among the visible ones. ValueError for more devices, or others, than there are."""
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
    """Return the variable that shows these of the visible devices. ValueError if there is none for them."""
    placement = place_on_accelerators(accelerator, None, devices, environ)
    if not device.hides(accelerator.runtime):
        raise ValueError(
            f"devices={list(devices)}: commands see all {accelerator.kind} devices, since no variable hides them"
        )
    return device.hiding(accelerator.runtime, placement.visible_devices or "", environ)
