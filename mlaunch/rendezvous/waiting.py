"""Waiting for a key of a store, with a limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Only torch 2.6 and 2.7 ask again and again: clone came with 2.8 (pytorch#150966).
_LONGEST_PAUSE = 0.05  # seconds


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Returns whether the key was set within ``timeout`` seconds. Ctrl-C and other signals are heard meanwhile.

    The store waits in C, where Python hears no signals, and holds its connection while it does. So another thread
    waits, on a connection of its own.
    """
    if store.check([key]):
        return True
    clone: Any = getattr(store, "clone", None)  # torch has it from 2.8 on
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
    """Asks again and again, ever less often, where a second connection cannot be had."""
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
    except Exception as error:  # passed on to the one who waits
        answer(error)
