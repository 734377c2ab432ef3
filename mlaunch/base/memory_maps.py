"""What this process has mapped, and the OpenMP pools of libraries that it has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

from mlaunch.base.frozen_record import frozen_record

_OMP_PAUSE_HARD = 2
_OPENMP = re.compile("lib(g|i)?omp")


def give_back_openmp_threads() -> None:
    """Ends the OpenMP pool that torch started in this process, so that a fork of it starts with a clean one.

    A child of fork that inherits libgomp's idea of a pool, without its threads, hangs in its first parallel
    operation. The next parallel operation of this process makes a new pool.
    """
    libraries = {mapping.path for mapping in mappings() if _OPENMP.match(os.path.basename(mapping.path))}
    for path in libraries:
        with contextlib.suppress(OSError, AttributeError):
            # Of each OpenMP that is loaded: torch and numpy may have brought one of their own.
            ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_HARD)


@frozen_record
class MemoryMapping:
    """A part of this process's memory. ``path``: of the file, "[heap]", or "" of what has no name."""

    start: int
    end: int
    permissions: str
    inode: int
    path: str


def mappings() -> list[MemoryMapping]:
    """Returns what this process has mapped; nothing if there is no /proc."""
    found = []
    with contextlib.suppress(OSError):
        for row in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")[:-1]:
            addresses, permissions, _, _, inode, *path = row.split(None, 5)  # a path may have spaces
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(MemoryMapping(start, end, permissions, int(inode), "".join(path)))
    return found
