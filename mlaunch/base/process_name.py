"""Names of processes for ``ps``, ``top`` and ``pgrep``, which would show each as the same interpreter."""

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
