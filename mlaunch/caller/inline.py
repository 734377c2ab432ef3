"""``inline=True``: a call without processes, for IDEs and profilers. The function runs here, in a world of one rank.

It finds what it finds in a rank (group, device, variables, seeds), which is gone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch.base import seeding
from mlaunch.base.exceptions import misuse
from mlaunch.caller.options.launch_options import Options
from mlaunch.rank import device, for_users, group, launcher_variables

if TYPE_CHECKING:
    import torch


def run_inline(
    options: Options, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Run the function; return a list of one value. Exceptions are raised as they are.

    Raises:
        RuntimeError: This process is in a process group already.
        ValueError: This machine has no such device, or this torch no such backend.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise misuse(
            RuntimeError(
                f"{name}() with inline=True in a process that is in a process group already: its function would run "
                f"in that one. Leave it before (torch.distributed.destroy_process_group()), or call "
                f"{name}.__wrapped__(...)"
            )
        )
    bound = _device(options)
    variables = {**(options.env or {}), **launcher_variables.identity(0, 1, 0, 1, "127.0.0.1", options.port)}
    seeded = contextlib.nullcontext() if options.seed is None else seeding.seeded(seeding.of_rank(options.seed, 0))
    with _environment(variables), _world_of_one(options, bound), seeded:
        return [function(*args, **kwargs)]


def _device(options: Options) -> torch.device:
    """Return the first device that the launch would use."""
    import torch

    kind = options.device_type
    there = device.accelerator() if torch.accelerator.is_available() else None
    if kind == "auto":
        kind = there or "cpu"
    if kind not in {"cpu", there}:
        has = f"{there} and the CPU" if there else "only the CPU"
        raise misuse(ValueError(f"device_type={kind!r} with inline=True: this machine has {has}"))
    return torch.device(kind) if kind == "cpu" else torch.device(kind, (options.devices or [0])[0])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _world_of_one(options: Options, bound: torch.device) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    from mlaunch.rank.become_rank import leave

    try:
        backend = device.choose_backend(options.backend, bound.type, device.offered())
    except ValueError as error:
        raise misuse(error) from None
    hook, index = sys.excepthook, 0
    if bound.type != "cpu":
        index = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(bound.index)
    group.join_world(dist.HashStore(), group.Membership(0, 1, backend, options.timeout_seconds, bound))
    before = for_users.note_device(bound)
    try:
        yield
    finally:
        for_users.note_device(before)
        leave()
        sys.excepthook = hook  # torch wraps it once more each time
        if bound.type != "cpu":
            torch.accelerator.set_device_index(index)
