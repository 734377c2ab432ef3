"""The states of a process that a test may change and that are put back: of each what reads it and what sets it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations, for which a test is too short
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

State = tuple[Callable[[], Any], Callable[[Any], object]]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@functools.cache
def all_of() -> Sequence[State]:
    """Returns them all."""
    return (*_of_torch(), *_of_python())


def changed_variables(since: Mapping[bytes, bytes]) -> dict[bytes, bytes | None]:
    """Returns the variables of the environment that were different or not there then; None: one is gone.

    From the dict of bytes that ``os.environ`` keeps, which tests change alone: to read all of them by its methods takes
    as long as half of what surrounds a test.
    """
    now = dict(os.environ._data)  # type: ignore[attr-defined]
    found: dict[bytes, bytes | None] = dict.fromkeys(since.keys() - now.keys())
    found.update(now.items() - since.items())
    return found


def _of_python() -> Sequence[State]:
    return (
        (_handlers, _put_handlers),
        (_logging, _put_logging),
        (_umask, os.umask),
        (_streams, _put_streams),
        (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        (sys.getrecursionlimit, sys.setrecursionlimit),
    )


def _handlers() -> dict[int, Any]:
    return {number: _signal.getsignal(number) for number in _SIGNALS}


def _put_handlers(found: dict[int, Any]) -> None:
    for number, handler in found.items():
        if handler is not None:
            signal.signal(number, handler)


def _logging() -> tuple[int, list[logging.Handler], int]:
    root = logging.getLogger()
    return root.level, list(root.handlers), root.manager.disable


def _put_logging(found: tuple[int, list[logging.Handler], int]) -> None:
    root = logging.getLogger()
    root.setLevel(found[0])
    root.handlers[:] = found[1]
    logging.disable(found[2])


def _umask() -> int:
    # The kernel tells it only in exchange for another one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.excepthook


def _put_streams(found: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook = found


def _of_torch() -> Sequence[State]:
    import torch

    from mlaunch.comm.rank import exchange, local_group
    from mlaunch.torch_parts import default_device

    cudnn = torch.backends.cudnn
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (default_device.that_was_set, torch.set_default_device),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_num_threads, torch.set_num_threads),
        (lambda: cudnn.deterministic, lambda on: setattr(cudnn, "deterministic", on)),
        (lambda: cudnn.benchmark, lambda on: setattr(cudnn, "benchmark", on)),
        (lambda: list(local_group._made), lambda made: local_group._made.__setitem__(slice(None), made)),
        (lambda: dict(exchange._gloo_twins), _put_twins),  # of the default group, for objects
    )


def _put_twins(found: dict[Any, Any]) -> None:
    from mlaunch.comm.rank import exchange

    exchange._gloo_twins.clear()
    exchange._gloo_twins.update(found)


def _deterministic() -> tuple[bool, bool]:
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
