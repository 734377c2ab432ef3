"""Ends what processes have left behind as they ended, so that programs which tidy up after others can do so."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from mlaunch.base import linux

_PATIENCE = 1.0  # seconds
_MANAGERS_PATIENCE = 3.0  # seconds: a manager stays for 2 s after its last client, and removes files then
_MANAGER = b"torch_shm_manager"
_TIDY_UP = (_MANAGER, b".resource_tracker import main;")  # multiprocessing's and joblib's


def end_children(spare: Collection[int] = ()) -> None:
    """Ends every child except ``spare``, and the descendants that fall to us as they end.

    They are asked to, and killed if they do not heed it in a moment. Programs that remove what others have left in
    /dev/shm end by themselves once those are gone, so they are killed last.
    """
    if linux.has_children() and linux.children() - set(spare):
        _wait(spare, ask=True)
        # Killed with their ranks, these programs left some ten files in /dev/shm per call.
        linux.kill_children({*spare, *filter(_tidies_up, linux.children())})
        _wait(spare, ask=False)
        linux.kill_children(spare)


def reap(spare: Collection[int]) -> None:
    """Takes the statuses of children that have ended, except ``spare``; leaves alone all that runs."""
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
    """Asks a process to end. A tracker would not heed SIGTERM, torch's manager would die of it without tidying up."""
    with contextlib.suppress(ProcessLookupError):
        if not _tidies_up(pid):
            os.kill(pid, signal.SIGTERM)


def _tidies_up(pid: int) -> bool:
    return any(name in _command(pid) for name in _TIDY_UP)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _reap_any(pids: Collection[int], timeout: float) -> bool:
    """Waits until some of these children have ended, and reaps them; False if none has within ``timeout`` seconds."""
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
