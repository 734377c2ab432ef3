"""One test on one rank. Everything here runs in the ranks.

A rank whose test has passed returns at once. Any other waits a moment for the rest: if all are done, all answer, and
the ranks are in step. If some are not, they may be waiting for this one for ever; then its verdict goes into the log
that it shares with pytest's process, and it raises, upon which the launcher calls the others back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import time
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from mlaunch.protocol import explain
from mlaunch.pytest import cases, group_names, isolation, rank_coverage, twins
from mlaunch.pytest.crossing import Beginning, Definition, RankTest, Verdict
from mlaunch.pytest.explanation import Explanation
from mlaunch.pytest.station import Station
from mlaunch.rank import breakpoints, in_step

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (pytest.skip.Exception, "skipped"),
    (unittest.SkipTest, "skipped"),
    (pytest.xfail.Exception, "xfailed"),
    (pytest.exit.Exception, "exit"),
)
_here: list[tuple[Station, Explanation, isolation.Baseline]] = []  # of this rank, once it has begun


class EndedAloneError(RuntimeError):
    """A rank's test did not pass, while other ranks were still in theirs."""


def begin(beginning: Beginning) -> None:
    """Prepares this rank for tests. Collective."""
    if beginning.coverage is not None:
        rank_coverage.start(beginning.coverage, beginning.directory)
    explanation = Explanation(beginning)
    _here[:] = [(Station(beginning), explanation, isolation.Baseline.of_now())]


def import_definition(definition: Definition) -> None:
    """Imports the module of a fixture here."""
    _here[0][1].function_of(definition)


def load(test: RankTest) -> None:
    """Imports the test's module, before its deadline begins; what that raises, the test will raise again."""
    _, explanation, baseline = _here[0]
    # Outside of the deadline: the first import of torch's libraries in a module may take longer than any test.
    with contextlib.suppress(Exception), isolation.surrounded(baseline, test.surroundings):
        explanation.function_of(test.definition)


def end_class() -> None:
    """Tears down what the last test's class has set up."""
    cases.end_class()


def regroup() -> None:
    """Leaves the process groups; the next call makes a new one. To be called on all ranks."""
    group_names.leave_world()


def run_test(sent: RankTest | bytes) -> Verdict:
    """Runs a test here, and says how it was. ``sent``: as ``light`` has made it."""
    test: RankTest = pickle.loads(sent) if isinstance(sent, bytes) else sent
    station, explanation, baseline = _here[0]
    verdict = _verdict(test, station, explanation, baseline)
    # Raised, so that the launcher ends the call on the others, who wait in a collective for this rank.
    if not station.finish(test.number, verdict):
        raise EndedAloneError(verdict.reason)
    return verdict


def _verdict(test: RankTest, station: Station, explanation: Explanation, baseline: isolation.Baseline) -> Verdict:
    watch = isolation.Watch(explanation.config, test.marks)
    made = twins.Twins(test, explanation.config)
    with isolation.surrounded(baseline, test.surroundings), watch, group_names.for_test(test.number), made:
        try:
            function = explanation.function_of(test.definition)
            cases.begin_class(getattr(function, "__mlaunch_owner__", None), test.number)
            rank_coverage.enter(test.nodeid)
            _call(_bound(function, test), {**test.values, **made.make()})
            found = Verdict("passed")
        except KeyboardInterrupt:  # the call is ended, and these ranks may be, too
            rank_coverage.save()
            raise
        except BaseException as error:
            _examined(error)
            # Before the failure is described, which takes time: the others wait for this one no longer than for a
            # running rank.
            station.leave(test.number)
            found = _of_error(error, test, explanation)
    station.leave(test.number)
    return _completed(found, watch, made)


def _bound(function: Callable[..., Any], test: RankTest) -> Callable[..., Any]:
    """Returns the function, with an instance of its class that is like the one in pytest's process."""
    owner = getattr(function, "__mlaunch_owner__", None)
    if test.state is None or owner is None:
        return function
    if issubclass(owner, unittest.TestCase):
        return functools.partial(cases.run_case, owner, test.definition.qualname.rpartition(".")[2], test.state)
    # Not its constructor, which has run in pytest's process, maybe with a fixture's values.
    instance = owner.__new__(owner)
    instance.__dict__.update(test.state)
    bound: Callable[..., Any] = getattr(instance, function.__name__)
    return bound


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


def _examined(error: BaseException) -> None:
    """Opens a prompt where a test has failed, if somebody debugs."""
    debugger = breakpoints.debugger_here()
    if debugger is not None and isinstance(error, Exception | pytest.fail.Exception) and _kind_of(error) == "failed":
        debugger.examine(error)


def _call(function: Callable[..., Any], values: dict[str, Any]) -> None:
    debugger = breakpoints.debugger_here()
    result = debugger.step_into(function, **values) if debugger is not None and _traced[0] else function(**values)
    if inspect.iscoroutine(result):
        import asyncio  # for this alone

        asyncio.run(result)


def _kind_of(error: BaseException) -> str:
    return next((word for exception, word in _KINDS if isinstance(error, exception)), "failed")


def _of_error(error: BaseException, test: RankTest, explanation: Explanation) -> Verdict:
    kind = _kind_of(error)
    reason = str(getattr(error, "msg", None) or error)
    longrepr, crash = explanation.of_error(error, test.definition)
    pickled = None if kind in {"skipped", "xfailed"} else explain.pickle_exception(error)
    return Verdict(kind, time.monotonic(), reason, longrepr if kind == "failed" else None, pickled, crash)


def _completed(found: Verdict, watch: isolation.Watch, made: twins.Twins) -> Verdict:
    """Returns it with what was seen besides."""
    seen = {
        "properties": tuple(made.properties),
        "warnings": watch.warnings,
        "logged": made.logged if found.outcome == "failed" else "",
        "left": watch.left,
        "resident": isolation.resident(),
        "entered": in_step.since_the_call(),
    }
    return Verdict(**{**vars(found), **seen})
