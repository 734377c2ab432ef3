"""Ways in which ranks end and places where they do. Calling processes import it, so torch comes in where it is used."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from mlaunch import launcher


def raise_error() -> None:
    raise ValueError("no such luck")


HOW: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(4),
    "segfault": lambda: ctypes.string_at(1),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "caller dies": lambda: (os.kill(int(os.environ["CALLER"]), signal.SIGKILL), signal.pause()),
}


def crash(how: str) -> None:
    """In rank 1 alone."""
    if os.environ.get("RANK") == "1":
        HOW[how]()


class Fuse:
    """Burns when it is pickled; ``late``: when it is unpickled; ``anywhere``: not in rank 1 alone."""

    def __init__(self, how: str, *, late: bool = False, anywhere: bool = False) -> None:
        self.how, self.late, self.anywhere = how, late, anywhere

    def __reduce__(self) -> tuple[Any, ...]:
        if self.late:
            return crash, (self.how,)
        (HOW[self.how] if self.anywhere else lambda: crash(self.how))()
        return int, ()


# Each place: what the ranks run, with which argument.


def in_the_function(how: str) -> None:
    import torch.distributed as dist

    crash(how)
    dist.barrier()


def in_a_collective(how: str) -> None:
    import torch.distributed as dist

    dist.all_gather_object([None] * dist.get_world_size(), Fuse(how))


def pickling_the_result(how: str) -> object:
    return Fuse(how)


def after_return(how: str) -> int:
    atexit.register(crash, how)
    return 5


def unpickling(_fuse: object) -> None:
    import torch.distributed as dist

    dist.barrier()


def limits(how: str) -> dict[str, Any]:
    return {"deadline": 0.7, "grace_period": 0.1} if how == "SIGSTOP" else {}


PLACES = {place.__name__: place for place in (in_the_function, in_a_collective, pickling_the_result, after_return)}


def call_at(where: str, how: str, start_method: str) -> Callable[[], object]:
    options = {"start_method": start_method, **limits(how)}
    if where in PLACES:
        return lambda: launcher(PLACES[where], 2, **options)(how)
    return lambda: launcher(unpickling, 2, **options)(Fuse(how, late=where == "unpickling", anywhere=True))
