"""The sets of ranks that tests share: one for each shape, until the session ends or its ranks are out of step."""

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
from mlaunch.protocol import pickling
from mlaunch.protocol.calls import Call
from mlaunch.pytest import wire
from mlaunch.pytest.caller import new_ranks
from mlaunch.pytest.caller.judgement import findings_of, is_out_of_step, judge, raise_of, warn_of
from mlaunch.pytest.caller.mark import ON_RANKS, Shape
from mlaunch.pytest.caller.sent_tests import GivenAttributes
from mlaunch.pytest.rank import isolation, run_test
from mlaunch.pytest.wire import Findings, RankTest, Surroundings, Verdict, packed
from mlaunch.ranks.caller.held import Held
from mlaunch.ranks.caller.kept_call import RanksFuture
from mlaunch.ranks.caller.ranks import Ranks

_numbers = itertools.count(1)  # of tests and of steps for fixtures
_REMEMBERED = 20  # tests
_GRACE = 2.0  # seconds; not the launcher's 5: a test that hangs is not saving anything
_SETS_ON_CPUS = 4
_IN_STEP = "the ranks are in step, and the next test runs on them"


@dataclasses.dataclass
class WideValues:
    """The values of fixtures of wider scope than a test's, by id, each with its fixture.

    ``suspects``: those that another fixture may change.
    """

    found: dict[int, tuple[object, Any]] = dataclasses.field(default_factory=dict)
    suspects: set[int] = dataclasses.field(default_factory=set)


@runtime_checkable
class Placed(Protocol):
    """A fixture in pytest's process whose values are made on ranks."""

    def on(self, shared: SharedRanks) -> object:
        """Return what to send in place of the values; make them on these ranks first if they are not there yet."""

    def end_on(self, shared: SharedRanks) -> None:
        """Tear the fixture down on these ranks."""


class SharedRanks:
    """One set of ranks, the values that it holds for tests, and the tests that it has run.

    ``like``: the ranks that these may replace later: import what their last test has imported; do not wait for it.
    """

    def __init__(
        self, shape: Shape, config: pytest.Config, values: WideValues, like: SharedRanks | None = None
    ) -> None:
        self.shape = shape
        self._values = values
        self.ran: deque[str] = deque(maxlen=_REMEMBERED)
        self.fixtures: dict[object, Held] = {}
        self.placed: dict[int, Placed] = {}  # by number, in the order in which they were set up
        self._prints: dict[object, bytes | None] = {}
        self.classes = GivenAttributes()
        self.is_out_of_step = False
        self.has_class = False  # which is torn down before the ranks end
        self._environ, self._directory, self._path = dict(os.environb), os.getcwd(), list(sys.path)
        self._loaded: dict[str, RankTest] = {}  # by file
        self._ready: list[RanksFuture] = []
        self._options: dict[float | None, Options] = {}
        self._resident: int | None = None
        self.deadline = float(config.getoption("ranks_deadline") or config.getini("ranks_deadline"))
        self.devices = new_ranks.WorkerDevices(shape, self.deadline * new_ranks.count_workers())
        try:
            self.ranks = self._started()
        except BaseException:
            self.devices.close()
            raise
        self._board, self._log = wire.new_barrier_files(shape.size)
        try:
            beginning = new_ranks.beginning_of(config, shape.size, self._board, self._log)
            if like is None:
                self.ranks.run(run_test.begin, beginning)
            else:
                self._ready.append(self.ranks.submit(run_test.begin, beginning))
                self._load_latest(like)
        except BaseException:
            self.close()
            raise

    def _started(self) -> Ranks:
        new_ranks.preload()
        return Ranks(
            # Lost ranks are replaced here: new ones must begin with the configuration, and the test's report says so.
            restart=False,
            n_gpus=self.shape.size,
            devices=self.devices.devices,
            device_type=self.shape.device_type,
            backend=self.shape.backend,
            numa=self.shape.numa,
            numa_memory=self.shape.numa_memory,
            grace_period=_GRACE,
            progress=False,
            env={**new_ranks.share_of_cores(self.shape.size), **self.devices.environ},
        )

    def _load_latest(self, like: SharedRanks) -> None:
        # Only the latest: the next tests are mostly of that file.
        for file, test in list(like._loaded.items())[-1:]:
            self._ready.append(self.ranks.submit(run_test.load, test))
            self._loaded[file] = test

    def is_ready(self) -> bool:
        """Wait until ranks that were started ahead are ready. False if something went wrong."""
        try:
            for future in self._ready:
                future.result()
        except Exception:  # what a module has raised, too; ranks that start now will say it again
            return False
        return not self.gone

    @property
    def gone(self) -> bool:
        """True if its ranks have ended."""
        return not self.ranks.owner

    def next_number(self) -> int:
        """Return a number for a test or step that no other has had."""
        return next(_numbers)

    def run(self, test: RankTest, deadline: float) -> Findings:
        """Run a test; return the findings of its ranks, also of a failure.

        Raises:
            TypeError: A value cannot be sent.
            RanksLost: The ranks had ended before.
        """
        self._load(test)
        if test.step is None:
            self.ran.append(test.nodeid)
            self.has_class |= test.state is not None
        if deadline not in self._options:  # they are checked when they are made, which takes as long as a call
            self._options[deadline] = Options(deadline=deadline, progress=False)
        try:
            values = self.ranks.call(self._options[deadline], Call(run_test.run_test, (packed(test),), {})).result()
        except Exception as error:
            report = report_of(error)
            if report is None or isinstance(error, RanksLost):
                raise
            after = "the next test gets new ranks" if self.gone else _IN_STEP
            return findings_of(error, report, test, self.shape.size, self._log, after)
        return Findings(self.shape.size, dict(enumerate(values)))

    def _load(self, test: RankTest) -> None:
        if test.definition.file not in self._loaded:
            bare = dataclasses.replace(
                test, values={}, state=None, request=None, changes=None, step=None, examples=None, marks=()
            )
            self._loaded[test.definition.file] = bare
            self.ranks.run(run_test.load, bare)

    def run_step(self, step: RankTest) -> None:
        """Set a fixture up on these ranks, or tear it down; raise what that raises there."""
        findings = self.run(step, self.deadline)
        warn_of(findings)
        self.is_out_of_step |= is_out_of_step(findings)
        raise_of(judge(findings))

    def given(self, value: Any) -> Any:
        """Return what to send for a value: a handle if these ranks hold it, or the value."""
        if isinstance(value, Placed):
            return value.on(self)
        owner, known = self._values.found.get(id(value), (None, None))
        if known is not value or owner is None:
            return value
        key = owner, id(value)
        now = fingerprint(value) if id(value) in self._values.suspects else None
        if key in self.fixtures and self._prints.get(key) != now:
            # Changed in pytest's process since it was sent, so that there it is newer than here.
            self.fixtures.pop(key).free()
        if key not in self.fixtures:
            try:
                # Once for each set of ranks: a data set of a session's fixture would be sent with each test.
                self.fixtures[key] = self.ranks.hold(_same, value)
                self._prints[key] = now
            except Exception:  # it cannot be sent; the call says why
                return value
        return self.fixtures[key]

    def surroundings(self) -> Surroundings:
        """Return the changes in this process since the ranks began."""
        found = isolation.changed_variables(self._environ).items()
        changed = {os.fsdecode(name): None if value is None else os.fsdecode(value) for name, value in found}
        there, path = os.getcwd(), list(sys.path)
        return Surroundings(
            changed, None if there == self._directory else there, None if path == self._path else tuple(path)
        )

    def grown(self, verdicts: dict[int, Verdict], limit: int) -> int:
        """Return by how many MiB a rank has grown if that is above the limit even after garbage collection; else 0."""
        most = max((verdict.resident for verdict in verdicts.values()), default=0)
        self._resident = most if self._resident is None else self._resident
        if most - self._resident <= limit or self.gone:
            return 0
        grown = max(self.ranks.run(isolation.collect)) - self._resident
        return grown if grown > limit else 0

    def close(self) -> None:
        """Tear down the test's class and the fixtures on the ranks, then end the ranks."""
        placed, self.placed = self.placed, {}
        if not self.is_out_of_step:  # else one of them could wait for another for ever
            self._end_class()
            for fixture in reversed(placed.values()):
                self._end(fixture)
        self.fixtures.clear()
        self.ranks.terminate()
        self.devices.close()
        for fd in (self._board, self._log):
            os.close(fd)

    def _end_class(self) -> None:
        if self.has_class and not self.gone:
            with contextlib.suppress(Exception):  # they have ended meanwhile
                self.ranks.call(
                    Options(deadline=self.deadline, progress=False), Call(run_test.end_class, (), {})
                ).result()

    def _end(self, fixture: Placed) -> None:
        """Tear down a fixture that other ranks may still have. What it raises belongs to no test, and is a warning."""
        if self.gone:
            return
        try:
            fixture.end_on(self)
        except RanksLost:  # they have ended meanwhile
            return
        except (Exception, pytest.fail.Exception) as error:
            told = f"the teardown of {fixture!r} raised {type(error).__name__}: {error}"
            warnings.warn(pytest.PytestWarning(told), stacklevel=1)


class _Digest:
    """A file that keeps only the hash of what is written, for ``fingerprint``."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b()

    def write(self, data: Any, /) -> None:
        self.hash.update(data)

    def seek(self, place: int, /) -> int:
        return place

    def truncate(self) -> int:
        return 0


def fingerprint(value: object) -> bytes:
    """Return a hash of a value's pickle, to see whether it has changed; b"" if it cannot be pickled."""
    digest = _Digest()
    try:
        for buffer in pickling.pickle_by_value(digest, value).buffers:
            digest.write(buffer)
    except Exception:  # the call says why
        return b""
    return digest.hash.digest()


def _same(value: Any) -> Any:
    return value


class RankPool:
    """The sets of ranks of a session; the one that was used last is at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.sets: dict[Shape, SharedRanks] = {}
        self.wide = WideValues()
        self._next: SharedRanks | None = None  # started ahead

    def of(self, shape: Shape) -> SharedRanks:
        """Return the set of this shape, a new one if none can be used. ValueError as ``Ranks`` raises it."""
        found = self.sets.get(shape)
        if found is not None and not (found.gone or found.is_out_of_step):
            self.sets[shape] = self.sets.pop(shape)
            return found
        self.drop(shape)
        self._make_room(shape)
        new_ranks.warn_of_cores(shape)
        self.sets[shape] = made = self._started_ahead(shape) or SharedRanks(shape, self._config, self.wide)
        return made

    def _started_ahead(self, shape: Shape) -> SharedRanks | None:
        found = self._next
        if found is None or found.shape != shape:
            return None
        self._next = None
        if found.is_ready():
            return found
        found.close()
        return None

    def start_ahead(self) -> None:
        """Start ranks that replace those used last if these are lost; do not wait for them.

        Only on CPUs, where nobody else needs what they hold.
        """
        if not (self._config.getini("ranks_reserve") and self.sets):
            return
        # Several workers have no cores to spare; and coverage would record the ranks in reserve, too.
        if new_ranks.count_workers() > 1 or new_ranks.coverage_plan(self._config) is not None:
            return
        like = list(self.sets.values())[-1]
        if self._next is not None and self._next.shape != like.shape:
            self._next.close()
            self._next = None
        if self._next is None and like.shape.device_type == "cpu":
            with contextlib.suppress(LaunchError, OSError, ValueError):  # a limit; the test that needs them reports it
                self._next = SharedRanks(like.shape, self._config, self.wide, like)

    def suspect(self, item: pytest.Function) -> None:
        """Note the values of wider scope that other fixtures of a test ask for, and so may change."""
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            if getattr(fixtures[-1].func, ON_RANKS, False):
                continue
            for name in fixtures[-1].argnames:
                if name in item.funcargs and id(item.funcargs[name]) in self.wide.found:
                    self.wide.suspects.add(id(item.funcargs[name]))

    def forget(self, owner: object) -> None:
        """Free the values of a fixture that is torn down."""
        for key in [key for key, (whose, _) in self.wide.found.items() if whose is owner]:
            del self.wide.found[key]
            self.wide.suspects.discard(key)
            for shared in self.sets.values():
                if (held := shared.fixtures.pop((owner, key), None)) is not None:
                    held.free()

    def drop(self, shape: Shape) -> None:
        """End the set of this shape, if there is one."""
        found = self.sets.pop(shape, None)
        if found is not None:
            found.close()

    def give_back(self) -> None:
        """End the sets whose devices other xdist workers wait for. Call it between two tests."""
        for shape in [shape for shape, shared in self.sets.items() if shared.devices.are_due()]:
            self.drop(shape)

    def close(self) -> None:
        """End all sets."""
        for shape in list(self.sets):
            self.drop(shape)
        if self._next is not None:
            self._next.close()
            self._next = None

    def _make_room(self, shape: Shape) -> None:
        """End sets on the same accelerators; on CPUs those unused for longest, if there are many."""
        alike = [other for other in self.sets if other.device_type == shape.device_type]
        # On accelerators one: two sets would share their memory.
        most = _SETS_ON_CPUS if shape.device_type == "cpu" else 1
        for other in alike[: max(0, len(alike) - most + 1)]:
            self.drop(other)


def only_devices_lack(error: ValueError, shape: Shape) -> bool:
    """True if this machine has too few devices for a shape, or none of the kind."""
    return shape.device_type != "cpu" and ("visible here" in str(error) or "is built for" in str(error))
