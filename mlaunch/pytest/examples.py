"""Tests with hypothesis on ranks: all draw the same examples, and make a failing one smaller together or not at all.

Hypothesis has a generator of its own, which the system seeds, and a database, to which each failure is written: ranks
would draw apart, and a collective would meet another example's. So pytest's process draws the seed, and there is no
database on ranks: the seed of a test that failed is kept, and draws the same examples in the next run.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlaunch.pytest.crossing import Examples
from mlaunch.pytest.station import Station

_SEED = pytest.StashKey[int]()  # of this session
_CACHED = "mlaunch/hypothesis"  # seeds of tests that have failed, in pytest's cache
_SETTINGS = "_hypothesis_internal_use_settings"
_OUTCOMES = 2**31


def examples_for(item: pytest.Function) -> Examples | None:
    """Return how the ranks of a test are to draw; None if it has no examples."""
    if "hypothesis" not in sys.modules or not getattr(item.obj, "is_hypothesis_test", False):
        return None
    from hypothesis import settings

    own = settings(getattr(item.obj, _SETTINGS, settings()), database=None, deadline=None)
    pickled = None
    with contextlib.suppress(Exception):  # the ranks then have what they find themselves
        pickled = pickle.dumps(own)
    return Examples(_seed_of(item), pickled)


def _seed_of(item: pytest.Function) -> int | str:
    config = item.config
    given = config.getoption("hypothesis_seed", None)
    if given is not None:
        return int(given) if str(given).isdigit() else str(given)
    failed = None if (cache := getattr(config, "cache", None)) is None else cache.get(_CACHED, {}).get(item.nodeid)
    if failed is not None:
        return int(failed)
    return config.stash.setdefault(_SEED, random.SystemRandom().getrandbits(64))


def note(item: pytest.Function, examples: Examples, *, failed: bool) -> str:
    """Keep the seed of a test that failed for the next run. Return what its report is to say of it."""
    cache = getattr(item.config, "cache", None)
    if cache is not None:
        seeds = dict(cache.get(_CACHED, {}))
        if failed:
            seeds[item.nodeid] = examples.seed
        if failed or seeds.pop(item.nodeid, None) is not None:
            cache.set(_CACHED, seeds)
    again = " and the next run of this test" if cache is not None else ""
    return f"--hypothesis-seed={examples.seed}{again} draws these examples again" if failed else ""


# On the ranks


class FailedApartError(BaseException):
    """An example failed here, and not in the same way on all ranks: hypothesis is not to try others."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def drawn_alike(
    function: Callable[..., Any], examples: Examples | None, station: Station, number: int
) -> Iterator[None]:
    """Have a test draw its examples as on all ranks."""
    function = getattr(function, "__func__", function)
    if examples is None:
        yield
        return
    from hypothesis import core

    hypothesis: Any = core
    seed, settings = hypothesis.global_force_seed, getattr(function, _SETTINGS, None)
    handle: Any = getattr(function, "hypothesis", None)
    hypothesis.global_force_seed = examples.seed
    hypothesis.running_under_pytest = hypothesis.pytest_shows_exceptiongroups = True
    if examples.settings is not None:
        setattr(function, _SETTINGS, pickle.loads(examples.settings))
    inner = getattr(handle, "inner_test", None)
    if inner is not None:
        handle.inner_test = _in_step(inner, station, number)
    try:
        yield
    finally:
        hypothesis.global_force_seed = seed
        if settings is not None:
            setattr(function, _SETTINGS, settings)
        if inner is not None:
            handle.inner_test = inner


def _in_step(test: Callable[..., Any], station: Station, number: int) -> Callable[..., Any]:
    """Return the test of one example, which raises what hypothesis takes up only where all ranks do."""
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
            station.leave_part(number, count)
            raise
        except BaseException as error:
            outcome = _kind_of(error)
            station.leave_part(number, count, outcome)
            if station.all_failed(number, count, outcome):
                raise
            _note_example(error, test, kwargs)
            raise FailedApartError(error) from None
        station.leave_part(number, count)
        return result

    return of_one


def _kind_of(error: BaseException) -> int:
    """Return a number that is the same for failures of one type at one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__qualname__} {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return 1 + zlib.crc32(place.encode()) % _OUTCOMES


def _note_example(error: BaseException, test: Callable[..., Any], values: dict[str, Any]) -> None:
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    told = f"Falsifying example: {test.__name__}({shown}), not made smaller: it did not fail in this way on all ranks"
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), told]
