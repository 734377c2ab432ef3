"""From options to a launch that this machine can serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import current_process
from typing import TYPE_CHECKING

from mlaunch.base import linux, rlimits
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.log import log
from mlaunch.caller.launch import device_choice
from mlaunch.caller.launch.device_choice import DeviceChoice
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report import notebook
from mlaunch.core import load
from mlaunch.protocol.server_messages import Ready
from mlaunch.protocol.settings import of_this_process
from mlaunch.protocol.spec import CallFacts, Context, LaunchSpec, RankDevices, Restarts, new_launch_id
from mlaunch.rank.setup import device

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts


@frozen_record
class ThisMachine:
    """What this machine offers to a launch. ``count``: counts the accelerators that an environment shows."""

    ready: Ready
    count: Callable[[Mapping[str, str]], int]


@frozen_record
class Attempt:
    """What differs between the attempts of a call. ``time_left``: seconds of its deadline, None: it has none.

    ``parts``: of the features that the call asks for; None: of none.
    """

    restart_count: int
    time_left: float | None
    parts: CallerParts | None = None


def plan(options: Options, machine: ThisMachine, name: str, environ: Mapping[str, str], attempt: Attempt) -> LaunchSpec:
    """Returns the launch that the options ask for on this machine. ValueError for what it does not have."""
    placed = place(options, machine, environ)
    world_size = options.world_size or placed.local_world_size
    _check_world(options, placed, world_size)
    # A warning and no error: the figure was measured with one torch, and a launch may get by with less.
    if lacks := rlimits.too_few_files(placed.local_world_size):
        log.warning("%s: %s", name, lacks)
    cluster = None
    if world_size > placed.local_world_size:
        cluster = load.room("machines", "caller", f"world_size={world_size}").rendezvous(options, environ, name)
    return LaunchSpec(
        launch_id=new_launch_id(),
        call=CallFacts(name, options.deadline, attempt.time_left, options.seed, options.results == "rank0"),
        local_world_size=placed.local_world_size,
        world_size=world_size,
        rank_start=options.rank_start,
        devices=RankDevices(
            placed.device_type,
            placed.visible_devices,
            device.choose_backend(options.backend, placed.device_type, machine.ready),
        ),
        timeout=options.timeout_seconds,
        grace_period=options.grace_period,
        restarts=Restarts(attempt.restart_count, options.max_restarts),
        port=options.port,
        torch_version=machine.ready.torch_version,
        secret=os.urandom(16).hex() if cluster is None else cluster.token or "",
        context=context_of(environ),
        cluster=cluster,
        sections={} if attempt.parts is None else attempt.parts.sections,
    )


def _check_world(options: Options, placed: DeviceChoice, world_size: int) -> None:
    here = placed.local_world_size
    if placed.device_type == "cpu" and not options.oversubscribe:
        device_choice.check_share(here, device.usable_cpus())
    if options.rank_start + here > world_size:
        raise ValueError(
            f"world_size={world_size} with {here} rank(s) on this machine from rank_start={options.rank_start}: "
            f"allowed: {options.rank_start + here} or more, or None for this machine alone"
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
    """Says where the ranks of this machine run. ValueError for what it does not have."""
    device_type = device_choice.choose_type(options.device_type, machine.ready)
    available = machine.count(environ) if device_type != "cpu" else 0
    if device_type == "cpu" or (options.device_type == "auto" and available == 0):
        return device_choice.place_on_cpus(options.n_gpus, options.devices)
    accelerator = device_choice.Accelerator(device_type, machine.ready.runtime or device_type, available)
    return device_choice.place_on_accelerators(accelerator, options.n_gpus, options.devices, environ)
