"""Hearing of files that are removed from a directory, by inotify, which the standard library lacks."""

from __future__ import annotations

import contextlib
import ctypes
import os

_CLOSE_ON_EXEC, _NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_REMOVED = 0x40 | 0x200 | 0x400 | 0x800  # IN_MOVED_FROM, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF
_ROOM = 65_536
_libc = ctypes.CDLL(None, use_errno=True)


def watch_removals(directory: str) -> int:
    """Returns a descriptor that can be read when a file there was removed or renamed, or the directory; -1: none."""
    fd: int = _libc.inotify_init1(_CLOSE_ON_EXEC | _NONBLOCK)
    if fd >= 0 and _libc.inotify_add_watch(fd, os.fsencode(directory), _REMOVED) < 0:
        os.close(fd)
        return -1
    return fd


def take_in(fd: int) -> None:
    """Reads what there is to hear."""
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, _ROOM):
            pass
