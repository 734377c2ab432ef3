"""This process as the system has it: its name, its limits, the cores that it uses, its memory maps, its debugger."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from mlaunch.base.frozen_record import frozen_record

_PR_SET_NAME = 15
_SHORT_LIMIT = 15  # bytes that the kernel keeps of a thread's name
_ARGUMENTS = slice(45, 47)  # in /proc/PID/stat behind the command: where the command line begins and ends
_FEW_THREADS = 64
_OMP_PAUSE_HARD = 2
_OPENMP = re.compile("lib(g|i)?omp")
_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "ulimit -n", "open files"),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "ulimit -f", "bytes in a file, memory files among them"),
}

_libc = ctypes.CDLL(None)


# Its name for ``ps``, ``top`` and ``pgrep``, which would show each process as the same interpreter


def name_process(role: str, of: str = "") -> None:
    """Name this process "mlaunch: ROLE of OF", and its main thread with as much of the role as fits.

    The command line is overwritten in memory, as setproctitle does; Python's copies (``sys.argv``, ``sys.orig_argv``)
    stay. A name that is longer than the command line is cut: the environment follows in memory.
    """
    _libc.prctl(_PR_SET_NAME, _short(role).encode(), 0, 0, 0)
    start, size = _command_line()
    if size > 1:
        title = f"mlaunch: {role}{f' of {of}' if of else ''}".encode(errors="replace")
        # If the last byte is not NUL, the kernel shows the text up to the first NUL.
        ctypes.memmove(start, title.replace(b"\0", b"")[: size - 2].ljust(size - 1, b"\0") + b".", size)


def _short(role: str) -> str:
    """Return the longest form that fits: half a rank's number would be another rank's."""
    forms = (f"mlaunch: {role}", f"mlaunch:{role}", f"mlaunch: {role.split()[0]}")
    return next((form for form in forms if len(form) <= _SHORT_LIMIT), "mlaunch")


@functools.cache  # forks of this process have the same
def _command_line() -> tuple[int, int]:
    """Return the address of this process's command line, and its size in bytes; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        _, _, rest = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        start, end = map(int, rest.split()[_ARGUMENTS])
        return start, end - start
    return 0, 0


def is_limit(error: BaseException) -> bool:
    """True if a limit of this process has caused the error."""
    return isinstance(error, OSError) and error.errno in _LIMITS


def name_limit(error: BaseException) -> None:
    """Add the limit to the error's message, if one has caused it."""
    if not isinstance(error, OSError) or error.errno not in _LIMITS or "ulimit" in str(error):
        return
    limit, command, what = _LIMITS[error.errno]
    soft, hard = resource.getrlimit(limit)
    most = "" if hard in {soft, resource.RLIM_INFINITY} else f", up to {hard}"
    error.strerror = f"{error.strerror}: the limit is {soft} {what}; raise it with {command}{most}"
    error.args = (error.errno, error.strerror)  # from which it is unpickled


def files_of_agent(ranks: int) -> int:
    """Return how many descriptors the agent of so many ranks of this machine needs, more than any other process.

    Measured by launches under falling limits, with torch 2.13: 2 ranks fail at 32, 4 at 44, 8 at 80.
    """
    return max(22 + 6 * ranks, 15 + 9 * ranks)


def too_few_files(ranks: int) -> str:
    """Return a message if this process's limit is too low for so many ranks; "" if it may be enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_of_agent(ranks)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    most = "" if hard == resource.RLIM_INFINITY else f", up to {hard}"
    if most and needed > hard:
        most = f", beyond its hard limit of {hard}, which root can raise"
    return f"{ranks} ranks need about {needed} open files, and this process may have {soft}: raise ulimit -n{most}"


def allow_files() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# Cores, where the kernel's own choice costs milliseconds


def cpus_of_list(text: str) -> frozenset[int]:
    """Return the numbers in a list as the kernel writes it, "0-7,16". ValueError for any other text."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ValueError(f"{part!r}: allowed: a number, or a range such as 0-7")
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)


def wait_on_one_core(number: int) -> set[int]:
    """Restrict the calling thread to one core, chosen by ``number``; return those that it had, for ``leave_core``.

    Several processes that are woken at once often run on one core, one after the other, while others are idle.
    """
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        # Measured: 15.4 ms to 12.9 for a call of 2 ranks after a pause, together with end_on_one_core.
        os.sched_setaffinity(0, {_core(number, before)})
    return before


def leave_core(before: set[int]) -> None:
    """Give the calling thread its cores back; do nothing if it has lost them meanwhile."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before)


def end_on_one_core(number: int) -> None:
    """Make the other threads of this process, which is about to end, end on one core, chosen by ``number``.

    The last to end frees the process's memory. Otherwise threads of several processes, which sleep where they ran last,
    often do that on one core, one process after the other, while other cores are idle.
    """
    with contextlib.suppress(OSError):  # no /proc, no descriptor left, or one that has just ended
        threads = {int(name) for name in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        # A system call for each: with more threads that would cost more than it saves.
        if len(threads) <= _FEW_THREADS:
            one = {_core(number, os.sched_getaffinity(0))}
            for thread in threads:
                os.sched_setaffinity(thread, one)


def _core(number: int, allowed: set[int]) -> int:
    return sorted(allowed)[number % len(allowed)]


# Memory maps, and the OpenMP pools of libraries that it has loaded


def give_back_openmp_threads() -> None:
    """End the OpenMP pool that torch started in this process, so that a fork of it starts with a clean one.

    A child of fork that inherits libgomp's idea of a pool, without its threads, hangs in its first parallel
    operation. The next parallel operation of this process makes a new pool.
    """
    libraries = {mapping.path for mapping in memory_mappings() if _OPENMP.match(os.path.basename(mapping.path))}
    for path in libraries:
        with contextlib.suppress(OSError, AttributeError):
            # Each OpenMP that is loaded: torch and numpy may have brought their own.
            ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_HARD)


@frozen_record
class MemoryMapping:
    """A part of this process's memory. ``path``: the file, "[heap]", or "" if it has no name."""

    start: int
    end: int
    permissions: str
    inode: int
    path: str


def memory_mappings() -> list[MemoryMapping]:
    """Return this process's mappings; none if there is no /proc."""
    found = []
    with contextlib.suppress(OSError):
        for row in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")[:-1]:
            addresses, permissions, _, _, inode, *path = row.split(None, 5)  # a path may have spaces
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(MemoryMapping(start, end, permissions, int(inode), "".join(path)))
    return found


# The debugger of an IDE, which follows the children of this process, as debugpy does by default

# Processes that mlaunch starts for itself run without the debugger, in which each fork of them would wait inside
# ``os.fork`` until the IDE has attached. Ranks attach by themselves, if that is wanted.
_stays = contextlib.ExitStack()  # never left


class not_followed:
    """A block in which the debugger does not follow what this thread starts."""

    def __enter__(self) -> None:
        self._patch: Any = getattr(sys.modules.get("_pydev_bundle.pydev_monkey"), "skip_subprocess_arg_patch", None)
        if self._patch is not None:
            self._patch = self._patch()
            self._patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._patch is not None:
            self._patch.__exit__(*error)


def stay_unfollowed() -> None:
    """Keep the debugger from following what this thread forks from now on."""
    _stays.enter_context(not_followed())
