"""The plugin proper, in pytest's process: runs a marked test on its ranks, and reports what they have found.

Setup, teardown, parameters, durations, xfail and reruns stay pytest's own: only the call of the function is ours.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from mlaunch.base.exceptions import RanksLost
from mlaunch.base.misuse import is_misuse
from mlaunch.pytest import body, cases, travel
from mlaunch.pytest.crossing import Findings, RankTest, Surroundings
from mlaunch.pytest.debugged import Debugging
from mlaunch.pytest.judgement import Judgement, is_out_of_step, judge, pass_on
from mlaunch.pytest.mark import WANTED, Wanted
from mlaunch.pytest.pool import POOL, RankPool, only_devices_lack
from mlaunch.pytest.shared_ranks import Placed, SharedRanks

_PLUGIN = "pytest_timeout"
_MANY = 10  # tests to come, for which it is worth to have ranks in reserve

_JUDGED = pytest.StashKey[Judgement]()
_SMALL = (int, float, bool, str, bytes, type(None))
_OUT_OF_STEP = (
    "the test left its ranks out of step: not all have entered the same collectives, or some have destroyed a group; "
    "new ranks replace them"
)


class Runner:
    """Runs tests on ranks. Registered once a test has the mark."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.pool = config.stash[POOL] = RankPool(config)
        self._numbers = itertools.count(1)
        self._debugging = Debugging(config)
        self._to_come = 0  # tests on ranks

    def take_in(self, item: pytest.Item) -> None:
        """Takes over a method of a TestCase, for which no hook would be asked."""
        cases.take_in(item, self.run)

    # Hooks

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Runs a test on its ranks, if it has the mark."""
        if pyfuncitem.stash.get(WANTED, None) is None:
            return None
        self.run(pyfuncitem)
        return True

    def run(self, pyfuncitem: pytest.Function) -> None:
        """Runs a test on its ranks, and raises what they have found."""
        wanted = pyfuncitem.stash[WANTED]
        pyfuncitem.stash[_JUDGED] = Judgement()
        self._to_come -= 1
        with _timeouts_suspended(pyfuncitem):
            findings = self._found(pyfuncitem, wanted)
        pyfuncitem.stash[_JUDGED] = judgement = judge(findings)
        pass_on(pyfuncitem, findings)
        if judgement.error is not None:
            raise judgement.error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Shows what a rank has shown, in place of our own lines."""
        report = yield
        judgement = item.stash.get(_JUDGED, None)
        if judgement is not None and judgement.error is not None and report.when == "call":
            if judgement.longrepr is not None and not report.passed:
                report.longrepr = judgement.longrepr
            elif report.skipped and judgement.crash is not None and not hasattr(report, "wasxfail"):
                report.longrepr = (*judgement.crash, f"Skipped: {judgement.error}")
            report.sections.extend(judgement.sections)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Notes values that several tests use: they travel once. Classes that ranks set up are not set up here."""
        if cases.is_set_up_on_ranks(request, fixturedef.argname):
            # Its own function would run setUpClass in pytest's process.
            object.__setattr__(fixturedef, "func", _nothing)
        value = yield
        if fixturedef.scope != "function" and not isinstance(value, _SMALL):
            # With the value, or its number would be another object's once it is gone.
            self.pool.wide[id(value)] = (fixturedef, value)
        return value

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Frees a value on the ranks with its fixture."""
        self.pool.forget(fixturedef)

    def pytest_runtest_logfinish(self) -> None:
        """Lets other xdist workers have devices that they wait for, and starts ranks for a bad moment."""
        self.pool.give_back()
        if self._to_come >= _MANY:
            self.pool.start_ahead()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Ends all ranks after the last test, before others see to what these have written: the innermost wrapper."""
        self._to_come = sum(item.stash.get(WANTED, None) is not None for item in session.items)
        try:
            return (yield)
        finally:
            self.pool.close()

    # The run of a test

    def _found(self, item: pytest.Function, wanted: Wanted) -> Findings:
        try:
            return self._run(item, wanted)
        except RanksLost:  # they have ended between two tests
            return self._run(item, wanted)

    def _run(self, item: pytest.Function, wanted: Wanted) -> Findings:
        values, made = travel.split(item)
        if self._debugging.wanted and not any(isinstance(value, Placed) for value in values.values()):
            return self._debugged(item, wanted, values, made)
        shared = self._ranks(wanted)
        try:
            if wanted.fresh == "group":
                shared.ranks.run(body.regroup)
            ran = list(shared.ran)
            sent = {name: shared.given(value) for name, value in values.items()}
            findings = self._sent(
                shared, self._test(item, shared.surroundings(), sent, made), values, self._deadline(item, wanted)
            )
            if not all(verdict.outcome == "passed" for verdict in findings.verdicts.values()) or findings.told:
                item.add_report_section("call", "ranks", _history(ran)) if ran else None
            self._look_after(shared, findings)
            return findings
        finally:
            if self._is_fresh(wanted):
                self.pool.drop(wanted.shape)

    def _debugged(
        self, item: pytest.Function, wanted: Wanted, values: dict[str, Any], made: tuple[str, ...]
    ) -> Findings:
        test = self._test(item, Surroundings({}, None, None), values, made)
        with self._devices_or_skip(wanted):
            return self._debugging.run(item, wanted.shape, test, self._deadline(item, wanted))

    def _ranks(self, wanted: Wanted) -> SharedRanks:
        if self._is_fresh(wanted):
            self.pool.drop(wanted.shape)
        with self._devices_or_skip(wanted):
            return self.pool.of(wanted.shape)

    @contextlib.contextmanager
    def _devices_or_skip(self, wanted: Wanted) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if not only_devices_lack(error, wanted.shape) or self._config.getoption("ranks_require"):
                raise
            size, kind = wanted.shape.size, wanted.shape.device_type
            raise pytest.skip.Exception(f"needs {size} {kind} devices: {error}") from None

    def _is_fresh(self, wanted: Wanted) -> bool:
        return wanted.fresh is True or bool(self._config.getoption("ranks_fresh"))

    def _sent(self, shared: SharedRanks, test: RankTest, values: dict[str, Any], deadline: float) -> Findings:
        try:
            return shared.run(test, deadline)
        except TypeError as error:
            if not is_misuse(error) or not (told := travel.who_cannot(values)):
                raise
            raise pytest.fail.Exception(told, pytrace=False) from None

    def _test(
        self, item: pytest.Function, surroundings: Surroundings, values: dict[str, Any], made: tuple[str, ...]
    ) -> RankTest:
        callspec = getattr(item, "callspec", None)
        return RankTest(
            next(self._numbers),
            item.nodeid,
            item.name,
            travel.definition_of(item),
            cases.state_of(item),
            values,
            made,
            surroundings,
            travel.marks_of(item, every="request" in made),
            dict(callspec.params) if callspec is not None and "request" in made else None,
        )

    def _deadline(self, item: pytest.Item, wanted: Wanted) -> float:
        config = self._config
        own = wanted.deadline or config.getoption("ranks_deadline") or config.getini("ranks_deadline")
        return min(float(own), _timeout_of(item) or float(own))

    def _look_after(self, shared: SharedRanks, findings: Findings) -> None:
        """Replaces ranks that are out of step, or whose memory has grown too much."""
        if is_out_of_step(findings):
            self.pool.drop(shared.shape)
            if all(verdict.outcome == "passed" for verdict in findings.verdicts.values()):
                warnings.warn(pytest.PytestWarning(_OUT_OF_STEP), stacklevel=1)
            return
        limit = int(self._config.getini("ranks_memory"))
        if grown := shared.grown(findings.verdicts, limit):
            self.pool.drop(shared.shape)
            warnings.warn(
                pytest.PytestWarning(f"ranks held {grown} MiB more than after their first test; new ones replace them"),
                stacklevel=1,
            )


def _nothing(request: pytest.FixtureRequest) -> None:
    """Does nothing, in place of a fixture that is for the ranks."""


def _history(ran: list[str]) -> str:
    quoted = " ".join(f"'{test}'" if "[" in test else test for test in ran)
    return f"these ranks had run {len(ran)} tests before; to run just these and this one after them:\npytest {quoted}"


def _timeout_of(item: pytest.Item) -> float:
    """Returns the seconds that pytest-timeout gives a test; 0: no limit. On ranks the deadline keeps it."""
    mark = item.get_closest_marker("timeout")
    given = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark is not None else None
    return float(getattr(item.config, "_env_timeout", None) or 0 if given is None else given)


@contextlib.contextmanager
def _timeouts_suspended(item: pytest.Item) -> Iterator[None]:
    """Makes pytest-timeout wait while the ranks run: it would interrupt pytest's process before these have answered."""
    hooks: Any = item.ihook
    settings = getattr(sys.modules.get(_PLUGIN), "_get_item_settings", None)
    if settings is None or not hasattr(hooks, "pytest_timeout_cancel_timer"):
        yield
        return
    hooks.pytest_timeout_cancel_timer(item=item)
    try:
        yield
    finally:
        if (found := settings(item)).timeout:
            hooks.pytest_timeout_set_timer(item=item, settings=found)
