"""The standard streams of this process, as its launches inherit them."""

from __future__ import annotations

import contextlib
import os
import sys


@contextlib.contextmanager
def standard_streams():  # type: ignore[no-untyped-def]
    """Gives descriptors 1 and 2 of this moment, or /dev/null for one that is closed.

    If this process began without it (under cron, say), any file may have taken the number since.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    streams = ((1, sys.__stdout__), (2, sys.__stderr__))
    try:
        yield [null if stream is None or not is_open(fd) else fd for fd, stream in streams]
    finally:
        os.close(null)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
