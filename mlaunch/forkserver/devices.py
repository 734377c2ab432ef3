"""Counts the accelerators of an environment, in a process of its own."""

from __future__ import annotations

import os
from typing import NoReturn

from mlaunch.base import linux
from mlaunch.base.process_name import name_process
from mlaunch.base.text import first_bytes
from mlaunch.protocol import payload
from mlaunch.protocol.channel import TEXT_LIMIT, Channel
from mlaunch.protocol.messages.server_messages import DeviceCount


def count_devices(environ_fd: int, answer_fd: int, parent: int) -> NoReturn:
    """Answers on the channel and ends: counting may wake a driver, after which no fork could use it."""
    try:
        linux.die_with(parent)
        name_process("device count")
        os.environ.clear()
        os.environ.update(payload.read(environ_fd))
        answer = DeviceCount(_count())
    except BaseException as error:  # whatever a driver may raise
        answer = DeviceCount(0, first_bytes(f"{type(error).__name__}: {error}", TEXT_LIMIT))
    try:
        Channel.adopt(answer_fd).try_send(answer)
    finally:
        os._exit(0)


def _count() -> int:
    import torch

    return torch.accelerator.device_count()
