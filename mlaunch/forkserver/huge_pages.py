"""What a fork server does once, in a pause, for all that it forks later."""

from __future__ import annotations

import ctypes
import linecache

from mlaunch.base import memory_maps

_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def settle() -> None:
    """Takes a tenth of a second, which a script of one launch need not spend."""
    _read_ahead()
    _use_huge_pages()


def _read_ahead() -> None:
    """Reads the file that most tracebacks of collectives show: 7,000 lines, for each rank that loses its partner."""
    from torch.distributed import distributed_c10d

    # Once here: read in each rank, it would be read by all of them just when their partner is lost.
    linecache.getlines(distributed_c10d.__file__)


def _use_huge_pages() -> None:
    """Moves this process's heap to huge pages, where the kernel can (6.1 or later), to halve a fork.

    torch leaves some 40,000 pages in the heap, and each fork copies every entry of a page table.
    """
    for mapping in memory_maps.mappings():
        # Private memory alone: of a file, or of what others share, nothing is copied at a fork.
        if not mapping.permissions.startswith("rw") or mapping.inode != 0 or mapping.path not in {"", "[heap]"}:
            continue
        start, end = -(-mapping.start // _HUGE_PAGE) * _HUGE_PAGE, mapping.end // _HUGE_PAGE * _HUGE_PAGE
        if start < end:
            # A call that fails (an older kernel, no memory in one piece) leaves the pages as they are.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
