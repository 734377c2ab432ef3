"""Modules that a user has a fork server import: their import must leave nothing behind that no fork may have."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mlaunch.base import linux
from mlaunch.rank.setup import device, process

_FORK_TIMEOUT = 10.0  # seconds for a fork that only ends


class PreloadError(RuntimeError):
    """A module cannot be imported before ranks are forked; the text says why."""


def load(names: Sequence[str]) -> None:
    """Import each module that is not there yet.

    Raises:
        PreloadError: The import left something behind; this process can fork no ranks any more.
    """
    for name in names:
        if name not in sys.modules:
            before = _held_by_forks()
            with process.noting_variables():
                __import__(name)
            if left := _left(*before):
                raise PreloadError(f"cannot preload {name}: its import {left}; import it in the function or script")


def _left(files: list[str], threads: int) -> str:
    """Return what has come since that no fork may have; "" if nothing has."""
    files_now, threads_now = _held_by_forks()
    if kind := _awake():
        return f"wakes the driver of {kind}, which no fork of this process could use then"
    if threads_now > threads:
        return "starts a thread, which no fork has"
    if opened := sorted(set(files_now) - set(files)) or (files_now != files and ["a file"]):
        return f"opens {opened[0]}, which all ranks would share"
    return "starts a process" if linux.has_children() else ""


def _awake() -> str | None:
    """Return the kind of accelerator that this process has initialised, if it has."""
    import torch

    kind = device.accelerator()
    awake = kind is not None and torch.get_device_module(kind).is_initialized()
    return kind if awake else None


def _held_by_forks() -> tuple[list[str], int]:
    """Return what is open, and the number of threads. Those of libraries that know forks (OpenBLAS) end at one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    linux.status_within(pid, _FORK_TIMEOUT)
    return held()


def held() -> tuple[list[str], int]:
    """Return the open files and the number of threads of this process; none where no /proc says it."""
    try:
        opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
    except FileNotFoundError:
        return [], 0
    return sorted(opened), len(os.listdir("/proc/self/task"))
