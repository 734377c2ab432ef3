"""Fixtures in the ranks: setup, values and teardown."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mlaunch.pytest.rank import group_names
from mlaunch.pytest.rank.rank_place import Place
from mlaunch.pytest.rank.rank_request import RankRequest
from mlaunch.pytest.wire.rank_tests import FixtureStep, RankTest

Key = tuple[str, str, int]  # file, name, and which of this name: a function may make several
_functions: dict[Key, Callable[..., Any]] = {}  # in every process that imports them


def registered(function: Callable[..., Any]) -> Key:
    """Register a function; return its key, which is the same in each process that imports it."""
    file, name = function.__code__.co_filename, function.__qualname__
    ordinal = next(number for number in itertools.count() if (file, name, number) not in _functions)
    _functions[file, name, ordinal] = function
    return file, name, ordinal


class OnRank:
    """A fixture's value among a test's arguments; on a rank it is unpickled as that rank's value."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return value_here, (self._number,)


_values: dict[int, Any] = {}  # of this rank, by number
_finalizers: dict[int, contextlib.ExitStack] = {}


def value_here(number: int) -> Any:
    """Return the value of a fixture on this rank."""
    return _values[number]


def rank_0s_value(number: int) -> Any:
    """Return the value of a fixture on rank 0, and None on the others."""
    from mlaunch.protocol import this_rank

    here = this_rank.this_rank
    return _values[number] if here is not None and here.rank == 0 else None


def function_here(step: FixtureStep) -> Callable[..., Any]:
    """Return the function of a fixture whose module has been imported."""
    return _functions[step.function]


def take(test: RankTest, step: FixtureStep, place: Place, config: pytest.Config) -> None:
    """Set a fixture up on this rank, or tear it down. Collective if the fixture is."""
    if step.ends:
        _values.pop(step.number, None)
        with _finalizers.pop(step.number, contextlib.nullcontext()):
            return
    with group_names.for_fixture(step.number), contextlib.ExitStack() as ends:
        _values[step.number] = _made(test, step, place, config, ends)
        _finalizers[step.number] = ends.pop_all()


def _made(test: RankTest, step: FixtureStep, place: Place, config: pytest.Config, ends: contextlib.ExitStack) -> Any:
    from _pytest.fixtures import call_fixture_func

    values, function = dict(step.values), function_here(step)
    if "pytestconfig" in step.twins:
        values["pytestconfig"] = config
    if "monkeypatch" in step.twins:
        values["monkeypatch"] = patch = pytest.MonkeyPatch()
        ends.callback(patch.undo)
    request: Any = _Finalized(step.name, ends.callback)
    if test.request is not None:
        values["request"] = request = RankRequest(test.request, config, place, ends, values)
        request.fixturename = step.name
    if place.instance is not None:
        function = function.__get__(place.instance)
    return call_fixture_func(function, request, values)


class _Finalized:
    """As much of a fixture's request as pytest's own code needs."""

    def __init__(self, name: str, add: Callable[..., object]) -> None:
        self.fixturename, self.addfinalizer = name, add
