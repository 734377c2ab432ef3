"""One test on one rank. Everything here runs in the ranks.

A rank whose test has passed returns at once. Any other waits a moment for the rest: if all are done, all answer, and
the ranks are in step. If some are not, they may wait for this one for ever: it writes its verdict into the log that it
shares with pytest's process, and raises, so that the launcher ends the call on the others.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlaunch.pytest.rank import fixtures_of_rank, hypothesis_draws, isolation, unittest_cases
from mlaunch.pytest.rank.explanation import Explanation, Place, kind_of
from mlaunch.pytest.wire import Beginning, ClassChanges, CoveragePlan, Part, RankBarrier, RankTest, Verdict
from mlaunch.rank import in_step

_here: list[tuple[RankBarrier, Explanation, isolation.Baseline]] = []  # of this rank, once it has begun


class EndedAloneError(RuntimeError):
    """A rank's test did not pass, while other ranks were still in theirs."""


def begin(beginning: Beginning) -> None:
    """Prepare this rank for tests. Collective."""
    if beginning.coverage is not None:
        _start_coverage(beginning.coverage, beginning.directory)
    explanation = Explanation(beginning)
    _here[:] = [(RankBarrier(beginning), explanation, isolation.Baseline.of_now())]


def load(test: RankTest) -> None:
    """Import the test's module before the test's deadline begins. The test raises again what that raises."""
    _, explanation, baseline = _here[0]
    # Not within the deadline: the first import of torch's libraries in a module may take longer than any test.
    with contextlib.suppress(Exception), isolation.surrounded(baseline, test.surroundings):
        explanation.rewrite(test.rewritten)
        explanation.found(test.definition, "")


def end_class() -> None:
    """Tear down what the last test's class has set up."""
    unittest_cases.end_class()


def regroup() -> None:
    """Leave the process groups; the next call makes a new one. Call it on all ranks."""
    isolation.leave_world()


def run_test(sent: RankTest | bytes) -> Verdict:
    """Run a test here; return its verdict. ``sent``: as ``light`` has made it."""
    test: RankTest = pickle.loads(sent) if isinstance(sent, bytes) else sent
    barrier, explanation, baseline = _here[0]
    verdict = _verdict(test, barrier, explanation, baseline)
    if test.step is None:
        _instances.clear()
    if not barrier.finish(test.number, verdict):
        raise EndedAloneError(verdict.reason)
    return verdict


def _verdict(test: RankTest, barrier: RankBarrier, explanation: Explanation, baseline: isolation.Baseline) -> Verdict:
    watch = isolation.Watch(explanation.config, test.marks, keeps=test.step is not None)
    place = Place(test.number, barrier, explanation)
    made = fixtures_of_rank.PerRankFixtures(test, explanation.config, place)
    if test.step is None:
        surrounded, groups = isolation.surrounded(baseline, test.surroundings), isolation.names_for_test(test.number)
    else:  # what a fixture changes stays until its end
        surrounded, groups = isolation.kept(baseline, test.surroundings), isolation.counted()
    with surrounded, watch, groups, made:
        try:
            explanation.rewrite(test.rewritten)
            _find(place, test, explanation)
            _run(test, place, made, barrier)
            found = Verdict("passed")
        except KeyboardInterrupt:  # the call is ended; these ranks may be ended with it
            save_coverage()
            raise
        except BaseException as raised:
            error = raised.error if isinstance(raised, hypothesis_draws.FailedApartError) else raised
            _examined(error)
            # Before the failure is described, which takes time.
            barrier.leave(test.number)
            found = place.describe(error)
    barrier.leave(test.number)
    return _completed(found, watch, made)


def _run(test: RankTest, place: Place, made: fixtures_of_rank.PerRankFixtures, barrier: RankBarrier) -> None:
    _set_attributes(place.owner, test.changes)
    if test.step is not None:
        enter_context(test.nodeid, test.step.ends)
        fixtures_of_rank.run_step(test, test.step, place, made.config)
        return
    unittest_cases.begin_class(place.owner, test.number)
    enter_context(test.nodeid)
    with hypothesis_draws.drawn_alike(place.function, test.examples, barrier, test.number):
        _call(_bound(place, test, made.parts), {**test.values, **made.make()})


def _find(place: Place, test: RankTest, explanation: Explanation) -> None:
    """Import what the test needs, and make the instance of its class like the one in pytest's process."""
    place.module = explanation.found(test.definition, "")
    if test.step is not None:
        place.function = fixtures_of_rank.function_here(test.step)
        place.owner = explanation.found(test.definition, test.step.owner) if test.step.owner else None
        name = test.step.test
    else:
        place.function, place.owner = explanation.function_of(test.definition)
        name = test.nodeid
    if place.owner is not None and test.state is not None:
        place.instance = _instance(name, place.owner, place.function.__name__)
        place.instance.__dict__.update(test.state)


def _bound(place: Place, test: RankTest, parts: list[Part]) -> Callable[..., Any]:
    """Return what to call with the test's arguments."""
    if isinstance(place.instance, unittest.TestCase):
        return functools.partial(unittest_cases.run_case, place.instance, parts, place)
    if place.instance is None:
        function: Callable[..., Any] = place.function
        return function
    bound: Callable[..., Any] = getattr(place.instance, test.definition.qualname.rpartition(".")[2])
    return bound


_instances: dict[str, Any] = {}  # of the next test, by its name: its fixtures share it


def _instance(name: str, owner: type, method: str) -> Any:
    """Return an instance. Its constructor has run in pytest's process, maybe with a fixture's values."""
    if name and name in _instances:
        return _instances[name]
    _instances.clear()
    made: Any = (
        unittest_cases.new_case(owner, method) if issubclass(owner, unittest.TestCase) else object.__new__(owner)
    )
    _instances[name] = made
    return made


class DebuggedTest:
    """A test that is a launch of its own, whose caller debugs it. ``traced``: from its first line on."""

    def __init__(self, beginning: Beginning, test: RankTest, *, traced: bool) -> None:
        self.__dict__["__qualname__"] = test.name  # which names the launch
        self._beginning, self._test, self._traced = beginning, test, traced

    def __call__(self) -> Verdict:
        """Run it on this rank."""
        begin(self._beginning)
        _traced[:] = [self._traced]
        return run_test(self._test)


_traced: list[bool] = [False]


def _examined(error: BaseException) -> None:
    """Open a prompt where a test has failed, if somebody debugs."""
    debugger = _debugger()
    if debugger is not None and isinstance(error, Exception | pytest.fail.Exception) and kind_of(error) == "failed":
        debugger.examine(error)


def _debugger() -> Any:
    """Return this rank's debugger; None if nobody debugs it."""
    return getattr(sys.breakpointhook, "debugger", None)


def _call(function: Callable[..., Any], values: dict[str, Any]) -> None:
    debugger = _debugger()
    result = debugger.step_into(function, **values) if debugger is not None and _traced[0] else function(**values)
    if inspect.iscoroutine(result):
        import asyncio  # only for this

        asyncio.run(result)


def _completed(found: Verdict, watch: isolation.Watch, made: fixtures_of_rank.PerRankFixtures) -> Verdict:
    """Return a verdict with what else was seen of the test."""
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


# What pytest's process has set on a test's class is set on a rank, too.

_NONE: object = object()
_replaced: dict[type, dict[str, Any]] = {}  # what classes had here before


class _Untold:
    """In place of a value that could not be sent."""

    def __init__(self, told: str) -> None:
        self._told = told

    def __get__(self, *_: object) -> Any:
        __tracebackhide__ = True
        raise TypeError(self._told)


def _set_attributes(owner: type | None, changes: ClassChanges | None) -> None:
    """Set on a class what pytest's process has set, and put back what it has removed."""
    if owner is None or changes is None:
        return
    before = _replaced.setdefault(owner, {})
    told = {name: _Untold(text) for name, text in changes.told.items()}
    for name, value in {**changes.given, **told}.items():
        before.setdefault(name, vars(owner).get(name, _NONE))
        setattr(owner, name, value)
    for name in changes.gone:
        _put_back(owner, name, before.pop(name, _NONE))


def _put_back(owner: type, name: str, value: object) -> None:
    if value is not _NONE:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


# coverage.py on ranks: each rank records into a file of its own beside that of pytest's process. pytest-cov combines
# these files at the end, ``coverage combine`` on request.

_recording: list[tuple[Any, bool]] = []  # of this rank: the recorder, and True if each test is a context


def _start_coverage(plan: CoveragePlan, directory: str) -> None:
    """Record the lines that run from here on, until this rank ends."""
    import coverage

    with _inside(directory):  # what relative names are relative to
        recorder = coverage.Coverage(**plan.options)
    recorder._warn_no_data = False  # these ranks may run tests of something else
    recorder.start()
    _recording[:] = [(recorder, plan.contexts)]
    atexit.register(save_coverage)


def enter_context(test: str, ends: bool | None = None) -> None:
    """Record the lines that run from here on for this test, if each test is a context of coverage.py.

    ``ends``: the setup (False) or teardown (True) of one of its fixtures; None: the test itself.
    """
    phase = "run" if ends is None else "teardown" if ends else "setup"
    for recorder, contexts in _recording:
        if contexts:
            recorder.switch_context(f"{test}|{phase}")


def save_coverage() -> None:
    """Write what was recorded so far to the file."""
    for recorder, _ in _recording:
        recorder.save()


@contextlib.contextmanager
def _inside(directory: str) -> Iterator[None]:
    before = os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
