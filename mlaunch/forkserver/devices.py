"""Counts of the accelerators in an environment, each in a process of its own."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from mlaunch.base import linux
from mlaunch.base.own_process import name_process
from mlaunch.base.text import first_bytes
from mlaunch.forkserver.agents import fork
from mlaunch.forkserver.children import Child
from mlaunch.protocol import payload
from mlaunch.protocol.channel import TEXT_LIMIT, Channel
from mlaunch.protocol.server_messages import COUNT_TIMEOUT, CountingSays, DeviceCount
from mlaunch.rank.setup import device


def begin_count(environ_fd: int, answer_fd: int, *, named: bool) -> Child | None:
    """Begin to count; return the process that does, None if the system refuses one. Owns the descriptors."""
    parent = os.getpid()
    pid = fork(answer_fd)
    if pid == 0:
        _count_devices(environ_fd, answer_fd, parent, named=named)
    os.close(environ_fd)
    return None if pid is None else Child(pid, os.pidfd_open(pid), Channel.adopt(answer_fd))


def _count_devices(environ_fd: int, answer_fd: int, parent: int, *, named: bool) -> NoReturn:
    """Answer on the channel and end: counting may wake a driver, after which no fork could use it."""
    try:
        linux.die_with(parent)
        name_process("device count")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(COUNT_TIMEOUT)  # nobody waits for longer
        # The caller's variables: those that hide devices may have changed since the server started.
        os.environ.clear()
        os.environ.update(payload.read(environ_fd))
        count = _count()
        answer = DeviceCount(count, names=_names(count) if named else ())
    except BaseException as error:  # whatever a driver may raise
        answer = DeviceCount(0, first_bytes(f"{type(error).__name__}: {error}", TEXT_LIMIT))
    try:
        channel: Channel[NoReturn, CountingSays] = Channel.adopt(answer_fd)
        channel.try_send(answer)
    finally:
        os._exit(0)


def _count() -> int:
    import torch

    # Called in either case: a name of an instance that does not exist must not count.
    return torch.accelerator.device_count() and (len(_instances()) or torch.accelerator.device_count())


def _instances() -> list[str]:
    return device.instances(os.environ) if device.runtime_of(device.accelerator()) == "cuda" else []


def _names(count: int) -> tuple[str, ...]:
    """Return names of the visible devices that are equal in all processes of this machine.

    Numbers are not: CUDA begins with the fastest, nvidia-smi goes by place, and variables hide some. UUIDs are.
    """
    import torch

    if instances := _instances():
        return tuple(instances)
    kind = device.accelerator() or ""
    # For other kinds torch has no UUID.
    if kind == "cuda" and count and hasattr(torch.cuda.get_device_properties(0), "uuid"):
        return tuple(f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count))
    runtime = device.runtime_of(kind) or kind
    return tuple(f"{kind}:{device.visible(runtime, [number], os.environ)}" for number in range(count))
