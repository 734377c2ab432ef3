"""Names processes for ``ps``, ``top`` and ``pgrep``, which would show each as the same interpreter otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

_PR_SET_NAME = 15
_SHORT_LIMIT = 15  # bytes that the kernel keeps of a thread's name
_ARGUMENTS = slice(45, 47)  # in /proc/PID/stat behind the command: where the command line begins and ends

_libc = ctypes.CDLL(None)


def name_process(role: str, of: str = "") -> None:
    """Names this process "mlaunch: ROLE of OF", and its main thread with as much of the role as fits.

    The command line is written over in memory, as setproctitle does; what Python has read of it (``sys.argv``,
    ``sys.orig_argv``) stays. A longer name than the command line is cut: the environment stands behind it.
    """
    _libc.prctl(_PR_SET_NAME, _short(role).encode(), 0, 0, 0)
    start, size = _command_line()
    if size > 1:
        title = f"mlaunch: {role}{f' of {of}' if of else ''}".encode(errors="replace")
        # With a last byte that is no NUL, the kernel shows what comes before the first one.
        ctypes.memmove(start, title.replace(b"\0", b"")[: size - 2].ljust(size - 1, b"\0") + b".", size)


def _short(role: str) -> str:
    """Returns the longest form that the kernel does not cut: half a rank's number would be another rank's."""
    forms = (f"mlaunch: {role}", f"mlaunch:{role}", f"mlaunch: {role.split()[0]}")
    return next((form for form in forms if len(form) <= _SHORT_LIMIT), "mlaunch")


@functools.cache  # forks of this process have the same
def _command_line() -> tuple[int, int]:
    """Returns where this process's command line is, and its size in bytes; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        _, _, rest = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        start, end = map(int, rest.split()[_ARGUMENTS])
        return start, end - start
    return 0, 0
