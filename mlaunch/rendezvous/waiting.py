"""Waiting for a key of a store, with a limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Returns whether the key was set within ``timeout`` seconds. Ctrl-C and other signals are heard meanwhile.

    The store waits in C, where Python hears no signals, and holds its connection while it does. So another thread
    waits, on a connection of its own.
    """
    if store.check([key]):
        return True
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    clone: Any = getattr(store, "clone")  # noqa: B009 - torch's annotations lack it
    threading.Thread(target=_wait, args=(clone, key, timeout, answers.put), daemon=True).start()
    error = answers.get()
    if error is None:
        return True
    if "timeout" in str(error).lower():  # the stores raise different types
        return False
    raise error


def _wait(
    clone: Callable[[], dist.Store], key: str, timeout: float, answer: Callable[[Exception | None], None]
) -> None:
    try:
        clone().wait([key], timedelta(seconds=timeout))
        answer(None)
    except Exception as error:  # passed on to the one who waits
        answer(error)
