"""detectron2's ``launch``, which runs a function as the decorator does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mlaunch.caller.launcher import launcher

R = TypeVar("R")

_HALF_AN_HOUR = timedelta(minutes=30)


def launch(
    main_func: Callable[..., R],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: Sequence[Any] = (),
    timeout: float | timedelta | None = _HALF_AN_HOUR,
    *,
    backend: str | None = None,
) -> list[R]:
    """Run ``main_func(*args)`` once per device; call it on every machine.

    In a world of one the function runs in this process, without a process group. Otherwise each rank is a process, with
    its device, its process group and ``mlaunch.comm``'s local group ready.

    Args:
        main_func: The function.
        num_gpus_per_machine: Ranks on each machine; without accelerators they are processes on its CPUs.
        num_machines: The number of machines.
        machine_rank: This machine's number, from 0.
        dist_url: "tcp://host:port" of machine 0. None or "auto": one machine, and the system chooses a port. On one
            machine, "file://..." does the same: no file is needed.
        args: The function's arguments.
        timeout: Limit in seconds (or a timedelta) for each collective; None: no limit.
        backend: The process group's, which some forks of detectron2 pass; None: the device's own. Pass it by name: its
            position differs there.

    Returns:
        The values of this machine's ranks, in the order of ranks. (detectron2 returns None.)

    Raises:
        ValueError: A number that is not allowed, or several machines without a ``dist_url`` that all can reach.
        Exception: As a call of a function under ``@launcher``.
    """
    _check_number("num_gpus_per_machine", num_gpus_per_machine, 1)
    _check_number("num_machines", num_machines, 1)
    _check_number("machine_rank", machine_rank, 0)
    if machine_rank >= num_machines:
        raise ValueError(f"machine_rank={machine_rank}: allowed of {num_machines} machine(s): 0 to {num_machines - 1}")
    host, port = _address(dist_url, num_machines)
    world_size = num_machines * num_gpus_per_machine
    if world_size == 1:
        return [main_func(*args)]
    run = launcher(
        main_func,
        n_gpus=num_gpus_per_machine,
        world_size=world_size,
        rank_start=machine_rank * num_gpus_per_machine,
        master_ip=host,
        port=port,
        timeout=timeout,
        backend=backend,
    )
    return run(*args)


def _address(url: str | None, machines: int) -> tuple[str, int]:
    if url is None or url == "auto" or url.startswith("file://"):
        if machines > 1:
            raise ValueError(
                f"dist_url={url!r} with num_machines={machines}: the machines cannot find each other by this; "
                f"give machine 0's address and a free port there: dist_url='tcp://10.0.0.1:29500'"
            )
        return "localhost", 0
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise ValueError(f"dist_url={url!r}: allowed: 'auto', 'tcp://host:port', 'file://...', or None")
    return parts.hostname, port


def _check_number(name: str, value: object, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name}={value!r}: allowed: whole numbers from {lowest}")
