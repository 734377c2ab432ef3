"""Fewer page table entries for the fork server, of which each fork copies every one."""

from __future__ import annotations

import ctypes
from pathlib import Path

_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def use_huge_pages() -> None:
    """Moves this process's heap to huge pages, where the kernel can (6.1 or later): 0.1 s once, to halve a fork.

    torch leaves some 40,000 pages in the heap.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split(None, 5)
        if not permissions.startswith("rw") or inode != "0" or (name and name[0] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if start < end:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
