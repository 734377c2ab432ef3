"""Waiting for what was prepared, and clearing it away."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlaunch import launcher
from tests import launches
from tests.processes import children, session_of, wait_gone

LIMIT = 60.0  # seconds, of every wait
TRIES = 50  # calls: the fork server may just have made later launches faster, for which it takes a new agent
PREPARED = "(prepared for the next call)"


def agents() -> list[int]:
    return children(launches.server_pid())


def until_kept(call: Callable[[], int]) -> int:
    """Calls until two calls in a row had the same agent, whose pid they return; returns that."""
    before = call()
    for _ in range(TRIES):
        if (now := call()) == before:
            return now
        before = now
    raise AssertionError("no agent has served two launches")


def prepared() -> dict[str, Any]:
    """Waits until the next launch waits for its call; returns what ``mlaunch ps`` knows of it."""
    until = time.monotonic() + LIMIT
    seen: list[dict[str, Any]] = []
    while time.monotonic() < until:
        seen = launches.ask("status")
        for launch in seen:
            ready = all(rank["state"] == launches.Phase.IDLE.value for rank in launch["ranks"])
            if launch["function"] == PREPARED and launch["agent"] in agents() and ready:
                return launch
        signal.sigtimedwait([], 0.01)
    raise TimeoutError(f"nothing was prepared; seen: {seen}")


def pids_of(launch: dict[str, Any]) -> list[int]:
    return [rank["pid"] for rank in launch["ranks"]]


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Has launches prepared, and none left behind."""
    before = os.environ.pop("MLAUNCH_PREPARE", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["MLAUNCH_PREPARE"] = before
        launches.drop_prepared()
        launcher(int, 1)()  # after it, the fork server no longer begins to prepare what was dropped
        servers = [pid for pid in children(os.getpid()) if session_of(pid) == pid]  # those that were replaced end, too
        wait_gone([*agents(), *(pid for pid in servers if pid != launches.server_pid())], LIMIT)
