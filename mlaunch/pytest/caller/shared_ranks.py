"""A set of ranks that tests of one shape share: what it holds for them, and how it runs one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import sys
import warnings
from collections import deque
from typing import Any, Protocol, runtime_checkable

import pytest

from mlaunch.base.exceptions import LaunchError, RanksLost, report_of
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.ranks.held import Held
from mlaunch.caller.ranks.kept_call import RanksFuture
from mlaunch.caller.ranks.ranks import Ranks
from mlaunch.protocol import pickling
from mlaunch.protocol.calls import Call
from mlaunch.pytest.caller import class_changes, early_server, xdist_workers
from mlaunch.pytest.caller.findings import beginning_of, findings_of
from mlaunch.pytest.caller.judgement import is_out_of_step, judge, raise_of, warn_of
from mlaunch.pytest.caller.mark import Shape
from mlaunch.pytest.rank import isolation, process_states, run_test
from mlaunch.pytest.wire import rank_barrier
from mlaunch.pytest.wire.rank_tests import Findings, RankTest, Surroundings, Verdict, light

_numbers = itertools.count(1)  # of tests and of steps for fixtures
_REMEMBERED = 20  # tests
# Not the launcher's 5 s: a test that hangs is not saving anything.
_GRACE = 2.0  # seconds
Wide = dict[int, tuple[object, Any]]  # values of wider scope than a test's, by id, and the fixtures that they are of


class Values(Protocol):
    """The values of fixtures of wider scope. ``suspects``: those that another fixture may change, by id."""

    wide: Wide
    suspects: set[int]


@runtime_checkable
class Placed(Protocol):
    """Stands for values that are made on ranks."""

    def on(self, shared: SharedRanks) -> object:
        """Returns what travels for those on these ranks, on which they are made if need be."""

    def end_on(self, shared: SharedRanks) -> None:
        """Take them down there."""


class SharedRanks:
    """One set of ranks, what it holds for tests, and which tests it has run.

    ``like``: others, whose place these are to take later; they get ready meanwhile.
    """

    def __init__(self, shape: Shape, config: pytest.Config, values: Values, like: SharedRanks | None = None) -> None:
        self.shape = shape
        self._values = values
        self.ran: deque[str] = deque(maxlen=_REMEMBERED)
        self.fixtures: dict[object, Held] = {}
        self.placed: dict[int, Placed] = {}  # by number, in the order in which they were set up
        self._prints: dict[object, bytes | None] = {}
        self.classes = class_changes.GivenAttributes()
        self.is_out_of_step = False
        self.has_class = False  # that is to be torn down there
        self._environ, self._directory, self._path = dict(os.environb), os.getcwd(), list(sys.path)
        self._loaded: dict[str, RankTest] = {}  # by file
        self._ready: list[RanksFuture] = []
        self._options: dict[float | None, Options] = {}
        self._resident: int | None = None
        self.deadline = float(config.getoption("ranks_deadline") or config.getini("ranks_deadline"))
        self._place = xdist_workers.WorkerDevices(shape, self.deadline * xdist_workers.count())
        try:
            self.ranks = self._started()
        except BaseException:
            self._place.close()
            raise
        self._board, self._log = rank_barrier.new_files(shape.size)
        try:
            beginning = beginning_of(config, shape.size, self._board, self._log)
            if like is None:
                self.ranks.run(run_test.begin, beginning)
            else:
                self._ready.append(self.ranks.submit(run_test.begin, beginning))
                self._load_latest(like)
        except BaseException:
            self.close()
            raise

    def _started(self) -> Ranks:
        early_server.prepare()
        return Ranks(
            # Lost ranks are replaced here: new ones must begin with the configuration, and the test's report says so.
            restart=False,
            n_gpus=self.shape.size,
            devices=self._place.devices,
            device_type=self.shape.device_type,
            backend=self.shape.backend,
            numa=self.shape.numa,
            numa_memory=self.shape.numa_memory,
            grace_period=_GRACE,
            progress=False,
            env={**xdist_workers.share_of_cores(self.shape.size), **self._place.environ},
        )

    def _load_latest(self, like: SharedRanks) -> None:
        # The latest alone: the tests to come are mostly of that file.
        for file, test in list(like._loaded.items())[-1:]:
            self._ready.append(self.ranks.submit(run_test.load, test))
            self._loaded[file] = test

    def is_ready(self) -> bool:
        """Waits until these ranks are, which were started ahead; tells whether nothing has gone wrong."""
        try:
            for future in self._ready:
                future.result()
        except Exception:  # what a module has raised, too; ranks that start now will say it again
            return False
        return not self.gone

    @property
    def is_due(self) -> bool:
        """Whether another xdist worker is to have its devices."""
        return self._place.are_due()

    @property
    def gone(self) -> bool:
        """Whether its ranks have ended."""
        return not self.ranks.owner

    def next_number(self) -> int:
        """Return a number for a test or step that no other has had."""
        return next(_numbers)

    def run(self, test: RankTest, deadline: float) -> Findings:
        """Runs a test, whatever comes of it.

        Raises:
            TypeError: A value cannot travel.
            RanksLost: The ranks had ended before.
        """
        self._load(test)
        if test.step is None:
            self.ran.append(test.nodeid)
            self.has_class |= test.state is not None
        if deadline not in self._options:  # they are checked when they are made, which takes as long as a call
            self._options[deadline] = Options(deadline=deadline, progress=False)
        try:
            values = self.ranks.call(self._options[deadline], Call(run_test.run_test, (light(test),), {})).result()
        except Exception as error:
            report = report_of(error)
            if report is None or isinstance(error, RanksLost):
                raise
            return self._findings(error, report, test)
        return Findings(self.shape.size, dict(enumerate(values)))

    def _load(self, test: RankTest) -> None:
        if test.definition.file not in self._loaded:
            bare = dataclasses.replace(
                test, values={}, state=None, request=None, changes=None, step=None, examples=None, marks=()
            )
            self._loaded[test.definition.file] = bare
            self.ranks.run(run_test.load, bare)

    def run_step(self, step: RankTest) -> None:
        """Set a fixture up on these ranks, or tear it down; raise what they have found."""
        findings = self.run(step, self.deadline)
        warn_of(findings)
        self.is_out_of_step |= is_out_of_step(findings)
        raise_of(judge(findings))

    def _findings(self, error: Exception, report: LaunchError, test: RankTest) -> Findings:
        after = "the next test gets new ranks" if self.gone else "the ranks are in step, and the next test runs on them"
        return findings_of(error, report, test, self.shape.size, self._log, after)

    def given(self, value: Any) -> Any:
        """Returns what travels for a value: the handle of what these ranks have of it, or the value."""
        if isinstance(value, Placed):
            return value.on(self)
        owner, known = self._values.wide.get(id(value), (None, None))
        if known is not value or owner is None:
            return value
        key = owner, id(value)
        now = fingerprint(value) if id(value) in self._values.suspects else None
        if key in self.fixtures and self._prints.get(key) != now:
            # Changed in pytest's process since it was sent, so that there it is newer than here.
            self.fixtures.pop(key).free()
        if key not in self.fixtures:
            try:
                # Once for each set of ranks: a data set of a session's fixture would travel with each test.
                self.fixtures[key] = self.ranks.hold(_same, value)
                self._prints[key] = now
            except Exception:  # it cannot travel; the call names it
                return value
        return self.fixtures[key]

    def surroundings(self) -> Surroundings:
        """Says what of this process's has changed since the ranks began."""
        found = process_states.changed_variables(self._environ).items()
        changed = {os.fsdecode(name): None if value is None else os.fsdecode(value) for name, value in found}
        there, path = os.getcwd(), list(sys.path)
        return Surroundings(
            changed, None if there == self._directory else there, None if path == self._path else tuple(path)
        )

    def grown(self, verdicts: dict[int, Verdict], limit: int) -> int:
        """Returns by how many MiB a rank has grown, if that is above the limit also when it has collected; else 0."""
        most = max((verdict.resident for verdict in verdicts.values()), default=0)
        self._resident = most if self._resident is None else self._resident
        if most - self._resident <= limit or self.gone:
            return 0
        grown = max(self.ranks.run(isolation.collect)) - self._resident
        return grown if grown > limit else 0

    def close(self) -> None:
        """Ends the ranks, after what they have of a test's class and of fixtures."""
        placed, self.placed = self.placed, {}
        if not self.is_out_of_step:  # else one of them could wait for another for ever
            self._end_class()
            for fixture in reversed(placed.values()):
                self._end(fixture)
        self.fixtures.clear()
        self.ranks.terminate()
        self._place.close()
        for fd in (self._board, self._log):
            os.close(fd)

    def _end_class(self) -> None:
        if self.has_class and not self.gone:
            with contextlib.suppress(Exception):  # they have ended meanwhile
                self.ranks.call(
                    Options(deadline=self.deadline, progress=False), Call(run_test.end_class, (), {})
                ).result()

    def _end(self, fixture: Placed) -> None:
        """Tear a fixture down that other ranks may have yet: what it raises belongs to no test."""
        if self.gone:
            return
        try:
            fixture.end_on(self)
        except RanksLost:  # they have ended meanwhile
            return
        except (Exception, pytest.fail.Exception) as error:
            told = f"the end of {fixture!r} raised {type(error).__name__}: {error}"
            warnings.warn(pytest.PytestWarning(told), stacklevel=1)


class _Digest:
    """What is pickled into, to be compared."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b()

    def write(self, data: Any, /) -> None:
        self.hash.update(data)

    def seek(self, place: int, /) -> int:
        return place

    def truncate(self) -> int:
        return 0


def fingerprint(value: object) -> bytes:
    """Return what is different once a value has changed."""
    digest = _Digest()
    try:
        for buffer in pickling.pickle_by_value(digest, value).buffers:
            digest.write(buffer)
    except Exception:  # it cannot travel; the call names it
        return b""
    return digest.hash.digest()


def _same(value: Any) -> Any:
    return value
