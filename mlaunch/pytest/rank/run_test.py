"""One test on one rank. Everything here runs in the ranks.

A rank whose test has passed returns at once. Any other waits a moment for the rest: if all are done, all answer, and
the ranks are in step. If some are not, they may be waiting for this one for ever; then its verdict goes into the log
that it shares with pytest's process, and it raises, upon which the launcher calls the others back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pickle
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from mlaunch.base.frames import is_library
from mlaunch.protocol import explain
from mlaunch.pytest.rank import (
    class_attributes,
    fixture_steps,
    group_names,
    hypothesis_draws,
    isolation,
    per_rank_fixtures,
    rank_coverage,
    unittest_cases,
)
from mlaunch.pytest.rank.explanation import Explanation
from mlaunch.pytest.rank.rank_request import Place
from mlaunch.pytest.wire.rank_barrier import RankBarrier
from mlaunch.pytest.wire.rank_tests import Beginning, Part, RankTest, Verdict
from mlaunch.rank import in_step

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (pytest.skip.Exception, "skipped"),
    (unittest.SkipTest, "skipped"),
    (pytest.xfail.Exception, "xfailed"),
    (pytest.exit.Exception, "exit"),
)
_MOST_PLACES = 20  # of a recursion without end, too
_here: list[tuple[RankBarrier, Explanation, isolation.Baseline]] = []  # of this rank, once it has begun


class EndedAloneError(RuntimeError):
    """A rank's test did not pass, while other ranks were still in theirs."""


def begin(beginning: Beginning) -> None:
    """Prepares this rank for tests. Collective."""
    if beginning.coverage is not None:
        rank_coverage.start(beginning.coverage, beginning.directory)
    explanation = Explanation(beginning)
    _here[:] = [(RankBarrier(beginning), explanation, isolation.Baseline.of_now())]


def load(test: RankTest) -> None:
    """Imports the test's module, before its deadline begins; what that raises, the test will raise again."""
    _, explanation, baseline = _here[0]
    # Outside of the deadline: the first import of torch's libraries in a module may take longer than any test.
    with contextlib.suppress(Exception), isolation.surrounded(baseline, test.surroundings):
        explanation.rewrite(test.rewritten)
        explanation.found(test.definition, "")


def end_class() -> None:
    """Tears down what the last test's class has set up."""
    unittest_cases.end_class()


def regroup() -> None:
    """Leaves the process groups; the next call makes a new one. To be called on all ranks."""
    group_names.leave_world()


def run_test(sent: RankTest | bytes) -> Verdict:
    """Runs a test here, and says how it was. ``sent``: as ``light`` has made it."""
    test: RankTest = pickle.loads(sent) if isinstance(sent, bytes) else sent
    barrier, explanation, baseline = _here[0]
    verdict = _verdict(test, barrier, explanation, baseline)
    if test.step is None:
        _instances.clear()
    # Raised, so that the launcher ends the call on the others, who wait in a collective for this rank.
    if not barrier.finish(test.number, verdict):
        raise EndedAloneError(verdict.reason)
    return verdict


def _verdict(test: RankTest, barrier: RankBarrier, explanation: Explanation, baseline: isolation.Baseline) -> Verdict:
    watch = isolation.Watch(explanation.config, test.marks, keeps=test.step is not None)
    place = _Place(test, barrier, explanation)
    made = per_rank_fixtures.PerRankFixtures(test, explanation.config, place)
    if test.step is None:
        surrounded, groups = isolation.surrounded(baseline, test.surroundings), group_names.for_test(test.number)
    else:  # what a fixture changes stays until its end
        surrounded, groups = isolation.kept(baseline, test.surroundings), group_names.counted()
    with surrounded, watch, groups, made:
        try:
            explanation.rewrite(test.rewritten)
            place.find()
            _run(test, place, made, barrier)
            found = Verdict("passed")
        except KeyboardInterrupt:  # the call is ended, and these ranks may be, too
            rank_coverage.save()
            raise
        except BaseException as raised:
            error = raised.error if isinstance(raised, hypothesis_draws.FailedApartError) else raised
            _examined(error)
            # Before the failure is described, which takes time: the others wait for this one no longer than for a
            # running rank.
            barrier.leave(test.number)
            found = place.describe(error)
    barrier.leave(test.number)
    return _completed(found, watch, made)


def _run(test: RankTest, place: _Place, made: per_rank_fixtures.PerRankFixtures, barrier: RankBarrier) -> None:
    class_attributes.apply(place.owner, test.changes)
    if test.step is not None:
        rank_coverage.enter(test.nodeid, test.step.ends)
        fixture_steps.take(test, test.step, place, made.config)
        return
    unittest_cases.begin_class(place.owner, test.number)
    rank_coverage.enter(test.nodeid)
    with hypothesis_draws.drawn_alike(place.function, test.examples, barrier, test.number):
        _call(place.bound(made.parts), {**test.values, **made.make()})


class _Place(Place):
    """Where on this rank a test is, or one of its fixtures."""

    def __init__(self, test: RankTest, barrier: RankBarrier, explanation: Explanation) -> None:
        super().__init__()
        self._test, self._station, self._explanation = test, barrier, explanation
        self._left = 0  # parts

    def find(self) -> None:
        """Import what the test needs, and make the instance of its class like the one in pytest's process."""
        test = self._test
        self.module = self._explanation.found(test.definition, "")
        if test.step is not None:
            self.function = fixture_steps.function_here(test.step)
            self.owner = self._explanation.found(test.definition, test.step.owner) if test.step.owner else None
            name = test.step.test
        else:
            self.function, self.owner = self._explanation.function_of(test.definition)
            name = test.nodeid
        if self.owner is not None and test.state is not None:
            self.instance = _instance(name, self.owner, self.function.__name__)
            self.instance.__dict__.update(test.state)

    def bound(self, parts: list[Part]) -> Callable[..., Any]:
        """Return what is to be called with the test's arguments."""
        if isinstance(self.instance, unittest.TestCase):
            return functools.partial(unittest_cases.run_case, self.instance, parts, self)
        if self.instance is None:
            function: Callable[..., Any] = self.function
            return function
        bound: Callable[..., Any] = getattr(self.instance, self._test.definition.qualname.rpartition(".")[2])
        return bound

    def describe(self, error: BaseException) -> Verdict:
        """Return what pytest's process is to hear of an exception."""
        kind = _kind_of(error)
        reason = str(getattr(error, "msg", None) or error)
        longrepr, crash = self._explanation.of_error(error, self.function, self.owner)
        if isinstance(error, unittest.SkipTest):
            crash = None  # raised where unittest, or mlaunch for it, reports it
        pickled = None if kind in {"skipped", "xfailed"} else explain.pickle_exception(error)
        return Verdict(
            kind, time.monotonic(), reason, None if kind == "skipped" else longrepr, pickled, crash, _places(error)
        )

    def leave_part(self, *, failed: bool) -> bool:
        """Say that this rank has left a part of the test. False if it failed there, and others are still in it."""
        self._left += 1
        self._station.leave_part(self._test.number, self._left)
        return not failed or self._station.all_left_part(self._test.number, self._left)


_instances: dict[str, Any] = {}  # of the test that is to run, by its name: its fixtures share it


def _instance(name: str, owner: type, method: str) -> Any:
    """Return an instance. Not by its constructor, which has run in pytest's process, maybe with a fixture's values."""
    if name and name in _instances:
        return _instances[name]
    _instances.clear()
    made: Any = (
        unittest_cases.new_case(owner, method) if issubclass(owner, unittest.TestCase) else object.__new__(owner)
    )
    _instances[name] = made
    return made


class DebuggedTest:
    """A test that is a launch of its own, whose caller debugs. ``traced``: from its first line on."""

    def __init__(self, beginning: Beginning, test: RankTest, *, traced: bool) -> None:
        self.__dict__["__qualname__"] = test.name  # by which the launch is known
        self._beginning, self._test, self._traced = beginning, test, traced

    def __call__(self) -> Verdict:
        """Runs it on this rank."""
        begin(self._beginning)
        _traced[:] = [self._traced]
        return run_test(self._test)


_traced: list[bool] = [False]


def _places(error: BaseException) -> tuple[tuple[str, int], ...]:
    """Return the frames of an exception that are in the user's files, the innermost first."""
    found = [(step.f_code.co_filename, line) for step, line in traceback.walk_tb(error.__traceback__)]
    theirs = (place for place in reversed(found) if not (is_library(place[0]) or place[0].startswith("<")))
    return tuple(itertools.islice(theirs, _MOST_PLACES))


def _examined(error: BaseException) -> None:
    """Opens a prompt where a test has failed, if somebody debugs."""
    debugger = _debugger()
    if debugger is not None and isinstance(error, Exception | pytest.fail.Exception) and _kind_of(error) == "failed":
        debugger.examine(error)


def _debugger() -> Any:
    """Return what debugs this rank; None: nobody does."""
    return getattr(sys.breakpointhook, "debugger", None)


def _call(function: Callable[..., Any], values: dict[str, Any]) -> None:
    debugger = _debugger()
    result = debugger.step_into(function, **values) if debugger is not None and _traced[0] else function(**values)
    if inspect.iscoroutine(result):
        import asyncio  # for this alone

        asyncio.run(result)


def _kind_of(error: BaseException) -> str:
    return next((word for exception, word in _KINDS if isinstance(error, exception)), "failed")


def _completed(found: Verdict, watch: isolation.Watch, made: per_rank_fixtures.PerRankFixtures) -> Verdict:
    """Returns it with what was seen besides."""
    seen = {
        "properties": tuple(made.properties),
        "marks": tuple(made.marks),
        "warnings": watch.warnings,
        "logged": made.logged,
        "parts": tuple(made.parts),
        "shown": "".join(made.shown),
        "left": watch.left,
        "resident": isolation.resident(),
        "entered": in_step.since_the_call(),
    }
    return Verdict(**{**vars(found), **seen})
