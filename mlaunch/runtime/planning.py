"""From options to a launch that this machine can serve."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping

from mlaunch.options import Options
from mlaunch.runtime import device
from mlaunch.runtime.messages import Context, LaunchSpec
from mlaunch.runtime.starting import ForkServer


def plan(options: Options, server: ForkServer, name: str, environ: Mapping[str, str], restart_count: int) -> LaunchSpec:
    """The launch that the options ask for on this machine. ValueError for what it does not have."""
    ready = server.ready()
    placement = _place(options, server, environ)
    if options.world_size not in {None, placement.local_size}:
        raise ValueError(
            f"world_size={options.world_size} with {placement.local_size} rank(s) on this machine: launches over "
            f"several machines are not in this version; allowed: {placement.local_size}, or None"
        )
    return LaunchSpec(
        launch_id=uuid.uuid4().hex[:12],
        name=name,
        local_size=placement.local_size,
        world_size=placement.local_size,
        rank_start=options.rank_start,
        device_type=placement.device_type,
        visible_devices=placement.visible_devices,
        backend=device.choose_backend(options.backend, placement.device_type, ready),
        timeout=options.timeout_seconds,
        grace_period=options.grace_period,
        deadline=options.deadline,
        restart_count=restart_count,
        max_restarts=options.max_restarts,
        context=_context(environ),
    )


def _context(environ: Mapping[str, str]) -> Context:
    try:
        cwd = os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "the working directory of this process no longer exists, so ranks cannot start in it; os.chdir() first"
        ) from error
    main = sys.modules.get("__main__")
    main_file = getattr(main, "__file__", None)
    main_name = getattr(getattr(main, "__spec__", None), "name", None)
    argv = tuple(getattr(sys, "argv", ()))
    return Context(dict(environ), cwd, tuple(sys.path), argv, main_file, main_name)


def _place(options: Options, server: ForkServer, environ: Mapping[str, str]) -> device.Placement:
    device_type = device.choose_type(options.device_type, server.ready())
    available = server.count_devices(environ) if device_type != "cpu" else 0
    if device_type == "cpu" or (options.device_type == "auto" and available == 0):
        return device.place_on_cpus(options.n_gpus, options.devices)
    return device.place_on_accelerators(device_type, options.n_gpus, options.devices, available, environ)
