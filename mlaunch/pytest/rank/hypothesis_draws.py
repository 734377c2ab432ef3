"""Tests with hypothesis: all ranks draw the same examples, and shrink a failing one together or not at all."""

from __future__ import annotations

import contextlib
import functools
import pickle
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlaunch.pytest.wire import Examples, RankBarrier

SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis keeps the settings of a test's function
_OUTCOMES = 2**31


class FailedApartError(BaseException):
    """An example failed here, and not in the same way on all ranks: hypothesis must not try others."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def drawn_alike(
    function: Callable[..., Any], examples: Examples | None, barrier: RankBarrier, number: int
) -> Iterator[None]:
    """Have a test draw the same examples on all ranks."""
    function = getattr(function, "__func__", function)
    if examples is None:
        yield
        return
    from hypothesis import core

    hypothesis: Any = core
    seed, settings = hypothesis.global_force_seed, getattr(function, SETTINGS, None)
    handle: Any = getattr(function, "hypothesis", None)
    hypothesis.global_force_seed = examples.seed
    hypothesis.running_under_pytest = hypothesis.pytest_shows_exceptiongroups = True
    if examples.settings is not None:
        setattr(function, SETTINGS, pickle.loads(examples.settings))
    inner = getattr(handle, "inner_test", None)
    if inner is not None:
        handle.inner_test = _in_step(inner, barrier, number)
    try:
        yield
    finally:
        hypothesis.global_force_seed = seed
        if settings is not None:
            setattr(function, SETTINGS, settings)
        if inner is not None:
            handle.inner_test = inner


def _in_step(test: Callable[..., Any], barrier: RankBarrier, number: int) -> Callable[..., Any]:
    """Return the test of one example. It raises an error that hypothesis shrinks only if all ranks do."""
    from hypothesis.errors import HypothesisException, StopTest

    quietly = (HypothesisException, StopTest, KeyboardInterrupt, pytest.skip.Exception, pytest.exit.Exception)
    count = 0

    @functools.wraps(test)
    def of_one(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal count
        count += 1
        try:
            result = test(*args, **kwargs)
        except quietly:
            barrier.leave_part(number, count)
            raise
        except BaseException as error:
            outcome = _kind_of(error)
            barrier.leave_part(number, count, outcome)
            if barrier.all_failed(number, count, outcome):
                raise
            _note_example(error, test, kwargs)
            raise FailedApartError(error) from None
        barrier.leave_part(number, count)
        return result

    return of_one


def _kind_of(error: BaseException) -> int:
    """Return a number that is the same for failures of one type at one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__qualname__} {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return 1 + zlib.crc32(place.encode()) % _OUTCOMES


def _note_example(error: BaseException, test: Callable[..., Any], values: dict[str, Any]) -> None:
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    told = f"Falsifying example: {test.__name__}({shown}), not shrunk: it did not fail in this way on all ranks"
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), told]
