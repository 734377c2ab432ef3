"""Imports of a fork server: torch, all else that the first launch needs, modules of the user, and late imports.

Late imports are those that ranks had to do: the server does them for later ranks, after a fork has tried them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import linecache
import os
import signal
import sys
import time
import weakref
from collections.abc import Collection, Sequence
from typing import NoReturn

from mlaunch.base import linux, own_process
from mlaunch.base.fds import OwnedFds
from mlaunch.base.own_process import name_process
from mlaunch.forkserver.children import Child
from mlaunch.protocol import late_imports
from mlaunch.protocol.server_messages import Ready
from mlaunch.rank import device, process

# Otherwise the first launch would import these while its ranks wait for each other.
_PRELOAD = (
    "torch", "torch.distributed", "multiprocessing.synchronize", "mlaunch.agent.main", "mlaunch.rendezvous.store_client"
)  # fmt: skip


_FORK_TIMEOUT = 10.0  # seconds for a fork that only ends
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 1024 * 1024
_TRIAL_LIMIT = 120  # seconds; torch._dynamo takes one, and ten times that on a busy machine
_LONGEST_HOLD = 3.0  # seconds that launches wait for a trial: callers wait for an agent little longer than a deadline
_NICE = 5  # a launch that comes meanwhile is more urgent
_libc = ctypes.CDLL(None, use_errno=True)


def load(preload: Sequence[str]) -> tuple[Ready, int]:
    """Import all; return what torch offers, and the process that finds out about libuv, for ``finish``.

    Raises PreloadError, TooOldError, and the errors of imports.
    """
    from mlaunch.rank import rank_imports

    gc.disable()  # imports leave little garbage, and the search takes a seventh of a first call
    device.check_version()
    rank_imports.watch_files()
    rank_imports.time_imports()
    with process.noting_variables():
        for module in _PRELOAD:
            __import__(module)
    load_for_user(preload)
    from mlaunch.agent import machine_limits
    from mlaunch.agent.machine_limits import Evidence
    from mlaunch.protocol import channel, messages, server_messages
    from mlaunch.rendezvous import tcp_store
    from mlaunch.rendezvous.address import lacks_loopback
    from mlaunch.torch_parts import operations, process_groups

    # Begun here, answered in finish(), which runs beside the caller, who has what it waits for.
    asked = tcp_store.ask_for_libuv()
    lacks = process_groups.lacks() or operations.lacks()
    operations.watch()  # here, as it takes a third of a millisecond
    Evidence()  # which looks for the cgroup's files once
    machine_limits.find_cgroups()
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


# Late imports


class LateImports:
    """Imports that a fork tries first: one that opens a device, or starts a thread, would ruin the server."""

    def __init__(self) -> None:
        self._off = os.environ.get("MLAUNCH_PREPARE") == "0"
        self._given_up: set[str] = set()
        self._on_trial: Sequence[str] = ()
        self._begun = 0.0
        self._told = -1 if self._off else late_imports.listen()

    def fds(self) -> list[int]:
        """Return a descriptor that can be read when a rank has imported a module of torch or mlaunch."""
        return [] if self._off else [self._told]

    def hears(self, ready: Collection[int]) -> bool:
        """True if a rank has imported such a module. ``ready``: descriptors that can be read."""
        if self._told not in ready:
            return False
        late_imports.hear()
        return True

    def holds(self) -> float:
        """Return for how many seconds launches should wait, as their ranks would import what is on trial; 0: none.

        Their deadlines have not begun. A trial may hang, so there is a limit.
        """
        if not {*late_imports.NAMES} & {*self._on_trial}:
            return 0.0
        return max(0.0, self._begun + _LONGEST_HOLD - time.monotonic())

    def wanted(self) -> bool:
        """True if there is something to try."""
        return not self._off and not self._on_trial and bool(self._missing())

    def wanted_now(self) -> bool:
        """True if modules of torch or mlaunch are to be tried: they take a second of each rank."""
        return self.wanted() and self._missing()[0] in late_imports.NAMES

    def _missing(self) -> list[str]:
        """Return the modules to try next: torch's and mlaunch's first, since the rest may fail."""
        known, standard = (
            [name for name in names if name not in self._given_up]
            for names in (late_imports.missing(), late_imports.missing_standard())
        )
        # Torch's make later forks slower (from 26 to 31 ms for a call of 2 ranks in a row, from 36 to 40 with
        # torch._dynamo), so they wait until a rank has needed them: the first optimizer takes 0.95 s without, 0.03 s
        # with.
        return known or standard

    def begin(self, owned: OwnedFds) -> Child | None:
        """Fork a process that tries to import the missing modules; None if the system refuses. It closes ``owned``."""
        self._on_trial, self._begun = self._missing(), time.monotonic()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            self.end(1)
            return None
        if pid == 0:
            self._try_out(parent, owned)
        return Child(pid, os.pidfd_open(pid), None)

    def _try_out(self, parent: int, owned: OwnedFds) -> NoReturn:
        """Import, and exit with 0 if that leaves nothing behind that a server must not have."""
        code = 1
        try:
            linux.die_with(parent)
            name_process("trial import")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_TRIAL_LIMIT)  # meanwhile nothing else is tried
            owned.close_in_child()
            with contextlib.suppress(OSError):
                os.nice(_NICE)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the second import repeats its warnings
            before = held()
            self._import()
            # Threads do not survive a fork, and all ranks would share an open file.
            code = int(held() != before)
        finally:
            os._exit(code)

    def end(self, status: int) -> None:
        """Import the modules here if the trial went well; otherwise never try them again."""
        with contextlib.suppress(Exception, SystemExit):  # a half import does no harm, and ranks report the error
            if status == 0:
                self._import()
                gc.collect()
                share()
        gc.enable()
        # After a success, too: a module that removes itself from sys.modules would be tried for ever.
        self._given_up.update(self._on_trial)
        self._on_trial = ()

    def _import(self) -> None:
        gc.disable()  # see ``load``
        with process.noting_variables():
            for name in self._on_trial:
                late_imports.import_module(name)
