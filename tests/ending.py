"""How a fork of ``tests/forked.py`` ends: without taking its modules apart.

To finalise an interpreter that has imported torch takes 0.4 s of CPU, which is half of what a script with one launch
costs. All that a script can see of its end has happened before: threads, exit handlers, streams. What is left out is
``__del__`` of what modules hold; a test about that starts a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

_noted: list[int] = []  # the exit status of this process, once it is known and an ordinary one


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note the exit status of what runs inside. An interrupt is left to the interpreter."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except SystemExit as leaving:
        _noted.append(leaving.code & 0xFF if isinstance(leaving.code, int) else int(leaving.code is not None))
        raise
    except BaseException:
        _noted.append(1)
        raise
    _noted.append(0)


def _end() -> None:
    if not _noted:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except Exception:
        return  # the interpreter has words and a status for that
    ctypes.CDLL(None).fflush(None)
    os._exit(_noted[-1])


atexit.register(_end)  # before any other module registers one, so it is the last to run
