"""The rest of the plugin, in pytest's process: run a marked test on its ranks, and report the outcome.

Setup, teardown, parameters, durations, xfail and reruns stay pytest's own: mlaunch only replaces the call of the
function. With ``--pdb`` and ``--trace``, each test is a launch of its own, whose ranks have a prompt here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from mlaunch.base.exceptions import RanksLost, report_of
from mlaunch.caller.launcher import launcher
from mlaunch.pytest import wire
from mlaunch.pytest.caller import new_ranks, sent_tests
from mlaunch.pytest.caller.judgement import (
    findings_of,
    is_out_of_step,
    judge,
    judgement_of,
    note_facts,
    note_size,
    pass_on,
    raise_of,
    report_parts,
    show,
)
from mlaunch.pytest.caller.mark import NAME, POOL, WANTED, Shape, Wanted
from mlaunch.pytest.caller.sent_tests import GivenAttributes
from mlaunch.pytest.caller.shared_ranks import Placed, RankPool, SharedRanks, only_devices_lack
from mlaunch.pytest.rank import run_test
from mlaunch.pytest.wire import Examples, Findings, RankTest

_TIMEOUTS = "pytest_timeout"  # a plugin
_MANY = 10  # tests to come, for which ranks in reserve are worth their start
_SET_UP_CLASS = "_unittest_setUpClass_fixture"  # what pytest calls it

_RANKS = pytest.StashKey[SharedRanks]()  # of a test
_EXAMPLES = pytest.StashKey[Examples | None]()
_SMALL = (int, float, bool, str, bytes, type(None))
_OUT_OF_STEP = (
    "the test left its ranks out of step: not all have entered the same collectives, or some have destroyed a group; "
    "new ranks replace them"
)


class Runner:
    """The plugin that runs tests on ranks. Registered once a test has the mark."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.pool = config.stash[POOL] = RankPool(config)
        self._fresh: Shape | None = None  # ranks of a test's own, which end with it
        self._debugging = Debugging(config)
        self._to_come = 0  # tests on ranks

    def prepare(self, item: pytest.Item) -> None:
        """Prepare for a test with the mark."""
        sent_tests.note_class(getattr(item, "cls", None))
        if sent_tests.is_case(item):  # pytest has no hook that runs a method of a TestCase
            item.runtest = functools.partial(self.run, item)  # type: ignore[arg-type, method-assign]

    def run(self, pyfuncitem: pytest.Function) -> None:
        """Run a test on its ranks in place of ``pytest_pyfunc_call``; raise its failure or skip."""
        wanted = pyfuncitem.stash[WANTED]
        self._to_come -= 1
        with _timeouts_suspended(pyfuncitem):
            findings = self._found(pyfuncitem, wanted)
        pass_on(pyfuncitem, findings)
        self._print(findings)
        report_parts(pyfuncitem, findings)
        judgement = judge(findings)
        if (drawn := pyfuncitem.stash.get(_EXAMPLES, None)) is not None:
            told = sent_tests.keep_seed(pyfuncitem, drawn, failed=judgement.error is not None)
            judgement.sections = [*judgement.sections, *([("hypothesis", told)] if told else [])]
        raise_of(judgement)

    def _print(self, findings: Findings) -> None:
        """Print what ranks have written while the test had capturing disabled."""
        texts = {rank: verdict.shown for rank, verdict in sorted(findings.verdicts.items()) if verdict.shown}
        capturing: Any = self._config.pluginmanager.get_plugin("capturemanager")
        with contextlib.nullcontext() if capturing is None or not texts else capturing.global_and_fixture_disabled():
            for rank, text in texts.items():
                sys.stdout.write("".join(f"[{rank}] {line}\n" for line in text.splitlines()))

    # Hooks

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show a rank's traceback in place of that of mlaunch, and note the facts for programs."""
        report = yield
        wanted = item.stash.get(WANTED, None)
        if wanted is not None and call.when == "setup":
            note_size(item, report, wanted.shape.size)
        judgement = judgement_of(None if call.excinfo is None else call.excinfo.value)
        if judgement is not None:
            show(report, judgement)
            note_facts(item, report, judgement.facts)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Set up the fixtures on the ranks, once pytest has set up all others."""
        yield
        wanted = item.stash.get(WANTED, None)
        if wanted is None or not isinstance(item, pytest.Function) or not (made := _placed(item)):
            return
        with _timeouts_suspended(item):
            try:
                self._place(item, wanted, made)
            except RanksLost:  # they have ended between two tests
                self._place(item, wanted, made)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Note values that several tests use, to send them once. Set up no class here that ranks set up."""
        if _is_set_up_on_ranks(request, fixturedef.argname):
            # Its own function would run setUpClass in pytest's process.
            object.__setattr__(fixturedef, "func", _nothing)
        value = yield
        if fixturedef.scope != "function" and not isinstance(value, _SMALL):
            # With the value: once that is gone, its id may be another object's.
            self.pool.wide.found[id(value)] = (fixturedef, value)
        return value

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Free the value of a fixture on the ranks."""
        self.pool.forget(fixturedef)

    def pytest_runtest_logfinish(self) -> None:
        """Release devices to other xdist workers that wait for them; start spare ranks."""
        if self._fresh is not None:
            self.pool.drop(self._fresh)
            self._fresh = None
        self.pool.give_back()
        if self._to_come >= _MANY:
            self.pool.start_ahead()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """End all ranks after the last test, before other plugins read their files: the innermost wrapper."""
        self._to_come = sum(item.stash.get(WANTED, None) is not None for item in session.items)
        try:
            return (yield)
        finally:
            self.pool.close()

    def pytest_sessionfinish(self) -> None:
        """End ranks that were started for a mark that a fixture has added."""
        self.pool.close()

    # The run of a test

    def _found(self, item: pytest.Function, wanted: Wanted) -> Findings:
        try:
            return self._run(item, wanted)
        except RanksLost:  # they have ended between two tests
            return self._run(item, wanted)

    def _run(self, item: pytest.Function, wanted: Wanted) -> Findings:
        values, made = sent_tests.split(item)
        if self._debugging.wanted and not _placed(item):
            return self._debugged(item, wanted, values, made)
        shared = self._place(item, wanted, _placed(item))
        ran = list(shared.ran)
        test = _sent_test(item, values, made)
        findings = self._sent(shared, self._for(shared, item, test), values, self._deadline(item, wanted))
        failed = findings.told or not all(verdict.outcome == "passed" for verdict in findings.verdicts.values())
        if failed and ran:
            item.add_report_section("call", "ranks", _history(ran))
        self._replace_bad_ranks(shared, findings)
        return findings

    def _place(self, item: pytest.Function, wanted: Wanted, made: Sequence[Placed]) -> SharedRanks:
        """Return the ranks of a test; set up there the fixtures that are made there."""
        shared = item.stash.get(_RANKS, None)
        if shared is None or shared.gone or shared.is_out_of_step:
            item.stash[_RANKS] = shared = self._ranks(wanted)
            if wanted.fresh == "group":
                shared.ranks.run(run_test.regroup)
        shared.deadline = self._deadline(item, wanted)
        for fixture in made:
            fixture.on(shared)
        return shared

    def _for(self, shared: SharedRanks, item: pytest.Function, test: RankTest) -> RankTest:
        """Return a test as it is sent to these ranks, without the values that they have already."""
        self.pool.suspect(item)
        return dataclasses.replace(
            test,
            number=shared.next_number(),
            surroundings=shared.surroundings(),
            values={name: shared.given(value) for name, value in test.values.items()},
            changes=shared.classes.changes(item.cls),
        )

    def _debugged(
        self, item: pytest.Function, wanted: Wanted, values: dict[str, Any], made: tuple[str, ...]
    ) -> Findings:
        test = dataclasses.replace(_sent_test(item, values, made), changes=GivenAttributes().changes(item.cls))
        with self._devices_or_skip(wanted):
            return self._debugging.run(item, wanted.shape, test, self._deadline(item, wanted))

    def _ranks(self, wanted: Wanted) -> SharedRanks:
        if self._is_fresh(wanted):
            self.pool.drop(wanted.shape)
            self._fresh = wanted.shape
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
            raise pytest.skip.Exception(f"needs {size} {kind} devices: {error}", _use_item_location=True) from None

    def _is_fresh(self, wanted: Wanted) -> bool:
        return wanted.fresh is True or bool(self._config.getoption("ranks_fresh"))

    def _sent(self, shared: SharedRanks, test: RankTest, values: dict[str, Any], deadline: float) -> Findings:
        try:
            return shared.run(test, deadline)
        except RanksLost:
            raise
        except Exception:  # whatever a __reduce__ may raise
            shared.classes = GivenAttributes()
            if not (told := sent_tests.why_not_sent(test, values)):
                raise
            raise pytest.fail.Exception(told, pytrace=False) from None

    def _deadline(self, item: pytest.Item, wanted: Wanted) -> float:
        config = self._config
        own = wanted.deadline or config.getoption("ranks_deadline") or config.getini("ranks_deadline")
        return min(float(own), _timeout_of(item) or float(own))

    def _replace_bad_ranks(self, shared: SharedRanks, findings: Findings) -> None:
        """Replace ranks that are out of step, or whose memory has grown too much."""
        if is_out_of_step(findings):
            shared.is_out_of_step = True
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


def _sent_test(item: pytest.Function, values: dict[str, Any], made: tuple[str, ...]) -> RankTest:
    item.stash[_EXAMPLES] = drawn = sent_tests.examples_for(item)
    return sent_tests.sent_test(item, values, made, drawn)


def _is_set_up_on_ranks(request: pytest.FixtureRequest, name: str) -> bool:
    """True if a fixture is ``setUpClass`` of a class with the mark that is not skipped."""
    if not name.startswith(_SET_UP_CLASS) or getattr(request.cls, "__unittest_skip__", False):
        return False
    return any(mark.name == NAME for mark in request.node.iter_markers())


def _placed(item: pytest.Function) -> list[Placed]:
    """Return the fixtures of a test that are made on ranks, whether or not its arguments name them."""
    return [value for value in item.funcargs.values() if isinstance(value, Placed)]


def _nothing(request: pytest.FixtureRequest) -> None:
    """Do nothing: the ranks set this class up."""


def _history(ran: list[str]) -> str:
    quoted = " ".join(f"'{test}'" if "[" in test else test for test in ran)
    return f"these ranks had run {len(ran)} tests before; to run just these and this one after them:\npytest {quoted}"


def _timeout_of(item: pytest.Item) -> float:
    """Return the seconds that pytest-timeout gives a test; 0: no limit. On ranks the deadline keeps it."""
    mark = item.get_closest_marker("timeout")
    given = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark is not None else None
    return float(getattr(item.config, "_env_timeout", None) or 0 if given is None else given)


@contextlib.contextmanager
def _timeouts_suspended(item: pytest.Item) -> Iterator[None]:
    """Stop pytest-timeout's timer while ranks run: it would interrupt pytest's process before these have answered."""
    hooks: Any = item.ihook
    settings = getattr(sys.modules.get(_TIMEOUTS), "_get_item_settings", None)
    if settings is None or not hasattr(hooks, "pytest_timeout_cancel_timer"):
        yield
        return
    hooks.pytest_timeout_cancel_timer(item=item)
    try:
        yield
    finally:
        if (found := settings(item)).timeout:
            hooks.pytest_timeout_set_timer(item=item, settings=found)


# Under --pdb and --trace, each test on ranks is a launch of its own, whose ranks have a prompt here: pytest's own would
# open in pytest's process, which does not run the test.

_AFTER = "pytest's --pdb: each test has ranks of its own"
_PROMPT = "pdbinvoke"  # pytest's plugin
DEBUGGED = pytest.StashKey[bool]()  # True for a test whose ranks had a prompt


class Debugging:
    """The plugin that runs tests on ranks that are debugged. ``wanted``: True if this session debugs."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._traced = bool(config.getoption("trace"))
        self.wanted = (self._traced or bool(config.getoption("usepdb"))) and self._somebody_is_there()
        if self.wanted and (plugin := config.pluginmanager.get_plugin(_PROMPT)) is not None:
            config.pluginmanager.unregister(plugin)
            config.pluginmanager.register(_PromptElsewhere(plugin), _PROMPT)

    def _somebody_is_there(self) -> bool:
        with self._shown():
            return sys.stdin.isatty() and sys.stdout.isatty()

    def run(self, item: pytest.Item, shape: Shape, test: RankTest, deadline: float) -> Findings:
        """Run a test; return what its ranks have found. ValueError: this machine does not have its devices."""
        item.stash[DEBUGGED] = True
        place = new_ranks.WorkerDevices(shape, deadline)
        board, log = wire.new_barrier_files(shape.size)
        beginning = new_ranks.beginning_of(self._config, shape.size, board, log)
        new_ranks.preload()
        try:
            with self._shown():
                run = launcher(
                    run_test.DebuggedTest(beginning, test, traced=self._traced),
                    shape.size,
                    devices=place.devices,
                    device_type=shape.device_type,
                    backend=shape.backend,
                    numa=shape.numa,
                    numa_memory=shape.numa_memory,
                    deadline=deadline,
                    progress=False,
                    debug=True,
                    env={**new_ranks.share_of_cores(shape.size), **place.environ},
                )
                return Findings(shape.size, dict(enumerate(run())))
        except Exception as error:
            report = report_of(error)
            if report is None:
                raise
            return findings_of(error, report, test, shape.size, log, _AFTER)
        finally:
            place.close()
            os.close(board)
            os.close(log)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Take the terminal, as pytest's own prompt does: nothing is captured meanwhile."""
        capturing: Any = self._config.pluginmanager.get_plugin("capturemanager")
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if capturing is not None:
            capturing.suspend(in_=True)
        if terminal is not None:
            terminal.ensure_newline()
        try:
            yield
        finally:
            if capturing is not None:
                capturing.resume()


class _PromptElsewhere:
    """The replacement of pytest's plugin that opens a prompt at a failure: it opens none after a prompt in a rank."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self.pytest_internalerror = plugin.pytest_internalerror

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        """Open pytest's prompt, unless a rank had one."""
        if call.when != "call" or not node.stash.get(DEBUGGED, False):
            self._plugin.pytest_exception_interact(node, call, report)
