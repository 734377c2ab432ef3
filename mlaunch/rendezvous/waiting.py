"""Waiting for other ranks at the store that they share, with a limit, and with names for those who do not come."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mlaunch.base.text import name_ranks

_rounds = itertools.count()


def barrier(timeout: float) -> None:
    """Returns once every rank has called it; TimeoutError after ``timeout`` seconds, naming those that had not."""
    store = dist.distributed_c10d._get_default_store()
    size, rank = dist.get_world_size(), dist.get_rank()
    key = f"mlaunch/barrier/{next(_rounds)}"
    store.set(f"{key}/{rank}", "")
    if store.add(f"{key}/arrived", 1) == size:
        store.set(f"{key}/everyone", "")
    if not wait_for(store, f"{key}/everyone", timeout):
        missing = [other for other in range(size) if not store.check([f"{key}/{other}"])]
        raise TimeoutError(f"synchronize: {name_ranks(missing)} did not come within {timeout:g} s")
    if store.add(f"{key}/left", 1) == size:
        for name in (*range(size), "arrived", "everyone", "left"):
            store.delete_key(f"{key}/{name}")


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Whether the key was set within ``timeout`` seconds. Ctrl-C and other signals are heard meanwhile.

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
    if not isinstance(error, dist.DistStoreError):
        raise error
    return False


def _wait(
    clone: Callable[[], dist.Store], key: str, timeout: float, answer: Callable[[Exception | None], None]
) -> None:
    try:
        clone().wait([key], timedelta(seconds=timeout))
        answer(None)
    except Exception as error:  # passed on to the one who waits
        answer(error)
