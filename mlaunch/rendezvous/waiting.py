"""Waiting for a key of a store, with a limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Only with torch 2.6 and 2.7, which have no clone(): it came with 2.8 (pytorch#150966).
_LONGEST_PAUSE = 0.05  # seconds between two questions to the store


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Return whether the key was set within ``timeout`` seconds. Ctrl-C and other signals work meanwhile.

    The store waits in C, where Python handles no signals, and occupies its connection meanwhile. So another thread
    waits, on its own connection.
    """
    if store.check([key]):
        return True
    clone: Any = getattr(store, "clone", None)
    if clone is None:
        return _ask_until(store, key, time.monotonic() + timeout)
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    # A daemon: after Ctrl-C nobody needs the thread, and the store cannot be made to return.
    threading.Thread(target=_wait, args=(clone, key, timeout, answers.put), daemon=True).start()
    error = answers.get()
    if error is None:
        return True
    if "timeout" in str(error).lower():  # the stores raise different types
        return False
    raise error


def _ask_until(store: dist.Store, key: str, deadline: float) -> bool:
    """Ask for the key again and again, with longer and longer pauses; True if it was set before the deadline."""
    pause = 0.001
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _wait(
    clone: Callable[[], dist.Store], key: str, timeout: float, answer: Callable[[Exception | None], None]
) -> None:
    try:
        clone().wait([key], timedelta(seconds=timeout))
        answer(None)
    except Exception as error:  # wait_for() raises it
        answer(error)
