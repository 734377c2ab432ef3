"""Imports of a fork server: torch, all else that the first launch needs, and modules of the user."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import linecache
import os
import sys
import weakref
from collections.abc import Sequence

from mlaunch.base import linux, own_process
from mlaunch.protocol.server_messages import Ready
from mlaunch.rank.setup import device, process

# Otherwise the first launch would import these while its ranks wait for each other.
_PRELOAD = (
    "torch", "torch.distributed", "multiprocessing.synchronize", "mlaunch.agent.main", "mlaunch.rendezvous.store_client"
)  # fmt: skip


_FORK_TIMEOUT = 10.0  # seconds for a fork that only ends
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def load(preload: Sequence[str]) -> tuple[Ready, int]:
    """Import all; return what torch offers, and the process that finds out about libuv, for ``finish``.

    Raises PreloadError, TooOldError, and the errors of imports.
    """
    from mlaunch.rank import reload, slow_imports

    gc.disable()  # imports leave little garbage, and the search takes a seventh of a first call
    device.check_version()
    reload.watch()
    slow_imports.prepare()
    with process.noting_variables():
        for module in _PRELOAD:
            __import__(module)
    load_for_user(preload)
    from mlaunch.agent import capacity
    from mlaunch.agent.evidence import Evidence
    from mlaunch.protocol import channel, messages, server_messages
    from mlaunch.rendezvous import tcp_store
    from mlaunch.rendezvous.address import lacks_loopback
    from mlaunch.torch_parts import operations, process_groups

    # Begun here, answered in finish(): by then the caller has what it waits for, and runs beside it.
    asked = tcp_store.ask_for_libuv()
    lacks = process_groups.lacks() or operations.lacks()
    operations.watch()  # here, as it takes a third of a millisecond
    Evidence()  # which looks for the cgroup's files once
    capacity.look()
    lacks_loopback()  # agents get the result
    channel.get_to_know([*vars(messages).values(), *vars(server_messages).values()])
    offered = device.offered()
    if lacks:
        from mlaunch.torch_parts import lacking

        offered = dataclasses.replace(offered, lacks=lacking.sentence(lacks))
    return offered, asked


def add(preload: Sequence[str]) -> None:
    """Import more modules for the user. Raises PreloadError, and the errors of imports."""
    if any(module not in sys.modules for module in preload):
        gc.disable()
        load_for_user(preload)
        share()


def finish(asked: int, *, collect: bool) -> None:
    """Finish what ``load`` has begun. ``collect``: collect garbage first."""
    from mlaunch.rendezvous import tcp_store

    # Garbage would be frozen with the rest, and stay for ever.
    if collect:
        gc.collect()
    tcp_store.hear_of_libuv(asked)
    share()


def share() -> None:
    """Prepare present objects for forks: no rank is to copy pages that it only inherits."""
    _leave_operators()
    gc.freeze()  # the collector's marks would copy every page that ranks share with us
    # Servers and agents live for days, and collecting new objects is cheap: a cycle of json.dump left an agent 2 KB
    # each time that its status was asked for.
    gc.enable()


def _leave_operators() -> None:
    """Keep processes from unregistering torch's operators at their ends."""
    take_apart = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek()
        if found is not None and found[1] is take_apart:
            # In each rank of a command, that copied 27 MB of shared pages, and took most of the time of its end.
            finalizer.atexit = False


# Modules of the user (``preload=``)


class PreloadError(RuntimeError):
    """A module cannot be imported before ranks are forked; the text says why."""


def load_for_user(names: Sequence[str]) -> None:
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
    """Return what an import has left that no fork may have; "" if nothing."""
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
    """Return ``held()`` after a fork, at which libraries that handle forks (OpenBLAS) end their threads."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    linux.status_within(pid, _FORK_TIMEOUT)
    return held()


def held() -> tuple[list[str], int]:
    """Return the open files and the number of threads of this process; none without /proc."""
    try:
        opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
    except FileNotFoundError:
        return [], 0
    return sorted(opened), len(os.listdir("/proc/self/task"))


# In a pause


def settle() -> None:
    """Make later forks cheaper. It takes a tenth of a second, so a script with one launch does without."""
    _read_ahead()
    _use_huge_pages()


def _read_ahead() -> None:
    """Read the file that most tracebacks of collectives show, of 7,000 lines."""
    from torch.distributed import distributed_c10d

    # Here, once: otherwise all ranks would read it at the moment when they lose a partner.
    linecache.getlines(distributed_c10d.__file__)


def _use_huge_pages() -> None:
    """Move this process's heap to huge pages, if the kernel can (6.1 or later): a fork takes half as long.

    torch leaves 40,000 pages in the heap, and each fork copies every entry of a page table.
    """
    for mapping in own_process.memory_mappings():
        # Private memory only: page tables of files and of shared memory are not copied at a fork.
        if not mapping.permissions.startswith("rw") or mapping.inode != 0 or mapping.path not in {"", "[heap]"}:
            continue
        start, end = -(-mapping.start // _HUGE_PAGE) * _HUGE_PAGE, mapping.end // _HUGE_PAGE * _HUGE_PAGE
        if start < end:
            # A call that fails (an older kernel, no memory in one piece) leaves the pages as they are.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
