"""The memory maps of this process, and the OpenMP pools of libraries that it has loaded."""

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
    """End the OpenMP pool that torch started in this process, so that a fork of it starts with a clean one.

    A child of fork that inherits libgomp's idea of a pool, without its threads, hangs in its first parallel
    operation. The next parallel operation of this process makes a new pool.
    """
    libraries = {mapping.path for mapping in mappings() if _OPENMP.match(os.path.basename(mapping.path))}
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


def mappings() -> list[MemoryMapping]:
    """Return this process's mappings; none if there is no /proc."""
    found = []
    with contextlib.suppress(OSError):
        for row in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")[:-1]:
            addresses, permissions, _, _, inode, *path = row.split(None, 5)  # a path may have spaces
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(MemoryMapping(start, end, permissions, int(inode), "".join(path)))
    return found
