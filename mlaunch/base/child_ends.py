"""Hears of the ends of children by SIGCHLD, beside what else a process waits for."""

from __future__ import annotations

import contextlib
import os
import signal

from mlaunch.base.fds import close_all

_READ = 4096  # bytes, one for each signal


class ChildEnds:
    """Can be read when some child has ended, or was stopped. To be made and closed in the main thread."""

    def __init__(self) -> None:
        self._ours, self._theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nobody is woken
        signal.set_wakeup_fd(self._theirs, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def fileno(self) -> int:
        return self._ours

    def take(self) -> None:
        """Reads what has come."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ours, _READ)

    def close(self) -> None:
        """Leaves the signal as it was."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._before)
        close_all([self._ours, self._theirs])
