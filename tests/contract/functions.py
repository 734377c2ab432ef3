"""Functions of an importable module, for the tests of how functions travel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from mlaunch import launcher

counter = [0]


@launcher(n_gpus=2)
def decorated(x: int) -> tuple[int, int]:
    """Adds the rank."""
    counter[0] += 1
    return x + dist.get_rank(), id_of_counter() == id(counter)


def id_of_counter() -> int:
    return id(counter)


def plain(x: int) -> int:
    return x * 10 + dist.get_rank()


launched = launcher(plain, 2)


class Model:
    scale = 3

    def __init__(self, bias: int) -> None:
        self.bias = bias

    @launcher(n_gpus=2)
    def fit(self, x: int, *, twice: bool = False) -> int:
        """Fits."""
        return (self.scale * x + self.bias) * (2 if twice else 1)

    @classmethod
    @launcher(n_gpus=1)
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    @launcher(n_gpus=1)
    def static() -> str:
        return "static"


def caller_and_arguments(*args: object, **kwargs: object) -> tuple[str, tuple[object, ...], dict[str, object]]:
    return sys._getframe(1).f_code.co_name, args, kwargs


def total() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def caught(call: Callable[[], object]) -> BaseException:
    """What a call raises, interrupts too."""
    try:
        found = call()
    except BaseException as error:
        return error
    raise AssertionError(f"it returned {found}")


def error_of(action: Callable[[], object]) -> str:
    """In a rank: what an action raises, as text."""
    try:
        return f"no error but {action()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def wait_in_vain(failing: int, key: str) -> None:
    """Raise on one rank, once the others wait in an operation that it never enters. ``key``: used once."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == failing:
        store.wait([key])
        raise ValueError("no such luck")
    work = dist.all_reduce(torch.ones(3), async_op=True)
    threading.Thread(target=_tell_once_it_waits, args=(key, threading.get_ident()), daemon=True).start()
    work.wait()


def _tell_once_it_waits(key: str, thread: int) -> None:
    """Set the key once that thread waits for the work: before, a busy machine finds it elsewhere."""
    while True:
        frame = sys._current_frames()[thread]
        if frame.f_code.co_name == "wait" and frame.f_back is not None and frame.f_back.f_code is wait_in_vain.__code__:
            break
        threading.Event().wait(0.01)
    dist.distributed_c10d._get_default_store().set(key, "waits")
