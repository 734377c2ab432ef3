"""Makes a fork of the zygote what a caller's own fork server would be, had the caller started it."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence

from mlaunch.protocol import settings
from mlaunch.rank.setup import process
from mlaunch.warm.wire.zygote_messages import CallersProcess

_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # which each interpreter ignores
_KEY_SIZE = 32  # bytes of multiprocessing's key


def take_over(caller: CallersProcess, path: Sequence[str], stdin: int, stderr: int) -> None:
    """Takes over a caller's surroundings, and a session of its own. Owns the descriptors."""
    # Away from the terminal of whoever has started the zygote, whose Ctrl-C is not this caller's.
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd, standard in ((stdin, 0), (null, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    _take_signals(caller.ignored)
    process.set_environ(dict(caller.environ))
    sys.path[:] = path
    sys.executable = caller.executable
    multiprocessing.set_executable(caller.executable)
    # Finders have cached directories as they were when the zygote began.
    importlib.invalidate_caches()
    settings.apply(caller.settings)
    _draw_afresh()


def _take_signals(ignored: Sequence[int]) -> None:
    """Changes what differs alone: Python does not know of handlers that C code has set."""
    for number in signal.valid_signals() - _PYTHONS - {signal.SIGKILL, signal.SIGSTOP}:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        wanted = signal.SIG_IGN if number in ignored else usual
        if signal.getsignal(number) != wanted:
            with contextlib.suppress(OSError, ValueError):  # the C library keeps some for itself
                signal.signal(number, wanted)
    # Last: what was held back until here meets the caller's dispositions, not the zygote's.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _draw_afresh() -> None:
    """Draws anew what each interpreter draws as it imports. Python's own generator sees to itself."""
    multiprocessing.current_process().authkey = os.urandom(_KEY_SIZE)
    generators = sys.modules.get("numpy.random")  # which numpy imports when it is first asked for
    if generators is not None:
        generators.seed()
