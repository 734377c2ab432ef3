"""The end of children, and of what they leave behind; programs that clean up after others get the time for it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from mlaunch.base import linux
from mlaunch.base.fds import close_all

_PATIENCE = 1.0  # seconds
_MANAGERS_PATIENCE = 3.0  # seconds: a manager stays for 2 s after its last client, and removes files then
_MANAGER = b"torch_shm_manager"
_READ = 4096  # bytes, one for each signal
_CLEANERS = (_MANAGER, b".resource_tracker import main;")  # multiprocessing's and joblib's


class ChildEnds:
    """A descriptor that can be read when a child has ended or was stopped (SIGCHLD). Only for the main thread."""

    def __init__(self) -> None:
        self._ours, self._theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
        signal.set_wakeup_fd(self._theirs, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def fileno(self) -> int:
        return self._ours

    def take(self) -> None:
        """Read the notices that have come."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ours, _READ)

    def close(self) -> None:
        """Restore the signal's handler."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._before)
        close_all([self._ours, self._theirs])


def end_children(spare: Collection[int] = ()) -> None:
    """End every child except ``spare``, and the descendants that this process adopts as they end.

    They are asked to end, and killed if they do not within a second. Programs that remove what others have left in
    /dev/shm end by themselves when the others are gone, so they are killed last.
    """
    if linux.has_children() and linux.children() - set(spare):
        _wait(spare, ask=True)
        # Killed together with the ranks, these programs left ten files in /dev/shm per call.
        linux.kill_children({*spare, *filter(_cleans_up, linux.children())})
        _wait(spare, ask=False)
        linux.kill_children(spare)


def reap(spare: Collection[int]) -> None:
    """Reap the children that have ended, except ``spare``."""
    for pid in linux.children() - set(spare):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _wait(spare: Collection[int], *, ask: bool) -> None:
    begun = time.monotonic()
    asked: set[int] = set()
    while linux.has_children() and (strangers := linux.children() - set(spare)):
        if ask:
            for pid in strangers - asked:
                _ask(pid)
            asked |= strangers
        waits = not ask and any(_MANAGER in _command(pid) for pid in strangers)
        left = begun + (_MANAGERS_PATIENCE if waits else _PATIENCE) - time.monotonic()
        if left <= 0 or not _reap_any(strangers, left):
            return


def _ask(pid: int) -> None:
    """Ask a process to end. A tracker would ignore SIGTERM, torch's manager would die of it without cleaning up."""
    with contextlib.suppress(ProcessLookupError):
        if not _cleans_up(pid):
            os.kill(pid, signal.SIGTERM)


def _cleans_up(pid: int) -> bool:
    return any(name in _command(pid) for name in _CLEANERS)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _reap_any(pids: Collection[int], timeout: float) -> bool:
    """Wait until some of these children have ended, and reap them; False if none has within ``timeout`` seconds."""
    pidfds: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds[os.pidfd_open(pid)] = pid
        ended = linux.wait_readable(pidfds, timeout)
        for pidfd in ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pidfds[pidfd], 0)
        return bool(ended)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
