"""Fixtures on a rank: pytest's own about their process (``monkeypatch``, ``capsys``, ...), and ``rank_fixture``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import _pytest.capture
import _pytest.logging
import pytest
from _pytest._io.saferepr import saferepr

from mlaunch.protocol import this_rank
from mlaunch.pytest.rank import isolation
from mlaunch.pytest.rank.explanation import Place
from mlaunch.pytest.wire import FixtureStep, Part, RankTest, RequestFacts

_WIDE = ("session", "package", "module")


class NamesWhatIsMissing:
    """An object whose missing attributes raise an error that says what to use instead."""

    _what = ""

    def __getattr__(self, name: str) -> Any:
        __tracebackhide__ = True
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._what}.{name} does not exist on a rank, where pytest itself does not run; "
            f"use it in a fixture, and give the test what that returns"
        )


class RankRequest(NamesWhatIsMissing):
    """``request`` of a test or a rank_fixture."""

    _what = "request"

    def __init__(
        self,
        facts: RequestFacts,
        config: pytest.Config,
        place: Place,
        end: contextlib.ExitStack,
        values: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.scope, self.fixturename, self.fixturenames = facts.scope, facts.fixturename, list(facts.fixturenames)
        self.node = RankNode(facts, config, place, getattr(end, "marks", []))
        self.keywords = self.node.keywords
        self._end, self._values = end, values
        if facts.param:
            self.param = facts.param[0]
        if facts.scope not in _WIDE[:1]:
            self.path = Path(facts.path)
        if facts.scope not in _WIDE[:2]:
            self.module = place.module
        if facts.scope not in _WIDE:
            self.cls = place.owner
            self.instance = place.instance if facts.scope == "function" else None
        if facts.scope == "function":
            self.function = place.function

    def addfinalizer(self, finalizer: Callable[[], object]) -> None:
        """Call something at the end of the test or fixture."""
        self._end.callback(finalizer)

    def applymarker(self, marker: str | pytest.MarkDecorator) -> None:
        """Give the test a mark that pytest reads after the run: ``xfail``."""
        self.node.add_marker(marker)

    def getfixturevalue(self, name: str) -> Any:
        """Return the value of an argument of the test. No other fixture can be set up on a rank."""
        __tracebackhide__ = True
        if name in self._values:
            return self._values[name]
        raise RuntimeError(f"no fixture can be set up on a rank: name {name!r} among the arguments of the test")


class RankNode(NamesWhatIsMissing):
    """``request.node`` of a test or a rank_fixture."""

    _what = "request.node"

    def __init__(self, facts: RequestFacts, config: pytest.Config, place: Place, given: list[pytest.Mark]) -> None:
        self._given = given
        self.name, self.nodeid, self.config = facts.node, facts.nodeid, config
        self.path = Path(facts.path)
        self.own_markers = list(facts.marks)
        self.keywords: dict[str, Any] = dict.fromkeys(facts.keywords, True) | {one.name: one for one in facts.marks}
        self.module, self.cls, self.instance = place.module, place.owner, place.instance
        if facts.originalname is not None:
            self.originalname = facts.originalname
            self.function = self.obj = place.function
        if facts.params is not None:
            test_id = facts.node.partition("[")[2].removesuffix("]")
            self.callspec = types.SimpleNamespace(params=facts.params, id=test_id)

    def add_marker(self, marker: str | pytest.MarkDecorator, append: bool = True) -> None:
        """Give the test a mark; pytest's process gets it with the outcome."""
        mark = (getattr(pytest.mark, marker) if isinstance(marker, str) else marker).mark
        self.own_markers.insert(len(self.own_markers) if append else 0, mark)
        self._given.append(mark)

    def iter_markers(self, name: str | None = None) -> Iterable[pytest.Mark]:
        """Yield the marks, of this name or all, the nearest first."""
        return (mark for mark in self.own_markers if name is None or mark.name == name)

    def get_closest_marker(self, name: str, default: pytest.Mark | None = None) -> pytest.Mark | None:
        """Return the nearest mark of this name."""
        return next(iter(self.iter_markers(name)), default)


_CAPTURE = "capturemanager"  # pytest's name for it
_TO_DESCRIPTORS = (_pytest.capture.FDCapture, _pytest.capture.FDCaptureBinary)
# True if caplog also has records of loggers that do not propagate.
_HAS_ALL_LOGGERS = hasattr(_pytest.logging.catching_logs, "attached_loggers")


class PerRankFixtures(contextlib.ExitStack):
    """pytest's own fixtures that a test asks for, which end with it."""

    def __init__(self, test: RankTest, config: pytest.Config, place: Place) -> None:
        super().__init__()
        self._test = test
        self.config = config
        self._place = place
        self._for_caplog, self._for_report = _handler(config), _handler(config)
        self._catching: list[logging.Logger] = []
        self.properties: list[tuple[str, object]] = []
        self.marks: list[pytest.Mark] = []
        self.parts: list[Part] = []
        self.shown: list[str] = []

    def __enter__(self) -> PerRankFixtures:
        root = logging.getLogger()
        self._catching = [root, *(_apart() if _HAS_ALL_LOGGERS else ())]
        for logger in self._catching:  # torch has forty, and addHandler takes a lock
            logger.handlers += [self._for_caplog, self._for_report]
        self.callback(self._stop_catching)
        level = _pytest.logging.get_log_level_for_setting(self.config, "log_level")
        if level is not None:
            self._for_caplog.setLevel(level)
            self._for_report.setLevel(level)
            self.callback(root.setLevel, root.level)
            root.setLevel(min(root.level, level))
        return self

    def _stop_catching(self) -> None:
        for logger in self._catching:
            for handler in (self._for_caplog, self._for_report):
                if handler in logger.handlers:  # the test may have removed it
                    logger.handlers.remove(handler)

    @property
    def logged(self) -> str:
        """The text that the test has logged."""
        return str(self._for_report.stream.getvalue()).strip()

    def make(self) -> dict[str, Any]:
        """Return the fixtures, by name."""
        return {name: _MAKE[name](self) for name in self._test.twins}

    def _monkeypatch(self) -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        self.callback(patch.undo)
        return patch

    def _mocker(self) -> Any:
        import pytest_mock  # pytest's process has it

        mocker = pytest_mock.MockerFixture(self.config)
        self.callback(mocker.stopall)
        return mocker

    def _capture(self, kind: type[Any], **config: bool) -> pytest.CaptureFixture[Any]:
        request: Any = types.SimpleNamespace(config=self.config)
        options: dict[str, Any] = {"config": config} if config else {}  # which pytest 8.3 does not know yet
        capture: pytest.CaptureFixture[Any] = pytest.CaptureFixture(kind, request, _ispytest=True, **options)
        capture._start()
        self.callback(capture.close)
        manager = RankCapture(capture, kind, self.shown)
        if (known := self.config.pluginmanager.get_plugin(_CAPTURE)) is not None:
            self.config.pluginmanager.unregister(known)
        self.config.pluginmanager.register(manager, _CAPTURE)
        return capture

    def _caplog(self) -> pytest.LogCaptureFixture:
        item: Any = types.SimpleNamespace(stash=pytest.Stash(), config=self.config)
        item.stash[_pytest.logging.caplog_handler_key] = self._for_caplog
        item.stash[_pytest.logging.caplog_records_key] = {"call": self._for_caplog.records}
        caplog = pytest.LogCaptureFixture(item, _ispytest=True)
        self.callback(caplog._finalize)
        return caplog

    def _request(self) -> RankRequest:
        facts = cast("RequestFacts", self._test.request)  # it comes where the test asks for it
        return RankRequest(facts, self.config, self._place, self, self._test.values)


# Parts of a test: ranks note them, and pytest's process reports them by its own fixture. A rank that fails in a part
# waits until the others have left it: what follows would meet what they still do there.


class RankSubtests:
    """The fixture ``subtests`` on a rank."""

    def __init__(self, parts: list[Part], place: Place) -> None:
        self._parts, self._place = parts, place

    def test(self, msg: str | None = None, **kwargs: Any) -> _RankPart:
        """Return a context manager for a part of the test whose failure does not end the test."""
        return _RankPart(self._parts, self._place, msg, kwargs)


class _RankPart:
    def __init__(self, parts: list[Part], place: Place, msg: str | None, kwargs: Mapping[str, Any]) -> None:
        self._parts, self._place = parts, place
        self._msg, self._kwargs = msg, {name: saferepr(value) for name, value in kwargs.items()}

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        __tracebackhide__ = True
        if isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
            return False
        described = None if error is None else self._place.describe(error)
        self._parts.append(Part(self._msg, self._kwargs, described))
        return self._place.leave_part(failed=error is not None)


class RankCapture:
    """In place of pytest's capturing, for a test that disables it: pytest's process then prints the text."""

    def __init__(self, capture: pytest.CaptureFixture[Any], kind: type[Any], shown: list[str]) -> None:
        self._capture, self._kind, self._shown = capture, kind, shown

    @contextlib.contextmanager
    def global_and_fixture_disabled(self) -> Iterator[None]:
        """Keep what is written meanwhile for pytest's process, which prints it."""
        self._capture._suspend()
        kind: Any = _pytest.capture.FDCapture if issubclass(self._kind, _TO_DESCRIPTORS) else _pytest.capture.SysCapture
        direct: Any = _pytest.capture.MultiCapture(in_=None, out=kind(1), err=kind(2))
        direct.start_capturing()
        try:
            yield
        finally:
            self._shown += filter(None, direct.readouterr())
            direct.stop_capturing()
            self._capture._resume()


def _handler(config: pytest.Config) -> _pytest.logging.LogCaptureHandler:
    handler = _pytest.logging.LogCaptureHandler()
    handler.setFormatter(_formatter(config))
    return handler


@functools.lru_cache(1)
def _formatter(config: pytest.Config) -> logging.Formatter:
    """Return the formatter that pytest makes of the options."""
    options = [
        _pytest.logging.get_option_ini(config, f"log_{name}") for name in ("format", "date_format", "auto_indent")
    ]
    plugin: Any = _pytest.logging.LoggingPlugin
    formatter: logging.Formatter = plugin._create_formatter(types.SimpleNamespace(_config=config), *options)
    return formatter


def _apart() -> Iterator[logging.Logger]:
    """Yield the loggers whose records do not reach the root."""
    for one in list(logging.root.manager.loggerDict.values()):
        if not getattr(one, "propagate", True) and isinstance(one, logging.Logger):
            yield one


_MAKE: dict[str, Callable[[PerRankFixtures], Any]] = {
    "monkeypatch": PerRankFixtures._monkeypatch,
    "recwarn": lambda own: own.enter_context(pytest.WarningsRecorder(_ispytest=True)),
    "capsys": lambda own: own._capture(_pytest.capture.SysCapture),
    "capsysbinary": lambda own: own._capture(_pytest.capture.SysCaptureBinary),
    "capteesys": lambda own: own._capture(_pytest.capture.SysCapture, tee=True),
    "capfd": lambda own: own._capture(_pytest.capture.FDCapture),
    "capfdbinary": lambda own: own._capture(_pytest.capture.FDCaptureBinary),
    "caplog": PerRankFixtures._caplog,
    "record_property": lambda own: lambda name, value: own.properties.append((name, value)),
    "mocker": PerRankFixtures._mocker,
    "subtests": lambda own: RankSubtests(own.parts, own._place),
    "request": PerRankFixtures._request,
    "pytestconfig": lambda own: own.config,
}
NAMES = frozenset(_MAKE)


# The values of rank_fixture

Key = tuple[str, str, int]  # file, name, and which of this name: a function may make several
_functions: dict[Key, Callable[..., Any]] = {}  # in every process that imports them


def register(function: Callable[..., Any]) -> Key:
    """Register a function; return its key, which is the same in each process that imports it."""
    file, name = function.__code__.co_filename, function.__qualname__
    ordinal = next(number for number in itertools.count() if (file, name, number) not in _functions)
    _functions[file, name, ordinal] = function
    return file, name, ordinal


class OnRank:
    """The value of a rank_fixture among a test's arguments: each rank unpickles its own value in its place."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return value_here, (self._number,)


_values: dict[int, Any] = {}  # of this rank, by number
_finalizers: dict[int, contextlib.ExitStack] = {}


def value_here(number: int) -> Any:
    """Return the value of a rank_fixture on this rank."""
    return _values[number]


def rank_0s_value(number: int) -> Any:
    """Return the value of a rank_fixture on rank 0, and None on the others."""
    here = this_rank.this_rank
    return _values[number] if here is not None and here.rank == 0 else None


def function_here(step: FixtureStep) -> Callable[..., Any]:
    """Return the function of a rank_fixture whose module has been imported."""
    return _functions[step.function]


def run_step(test: RankTest, step: FixtureStep, place: Place, config: pytest.Config) -> None:
    """Set a rank_fixture up on this rank, or tear it down. Collective if the fixture is."""
    if step.ends:
        _values.pop(step.number, None)
        with _finalizers.pop(step.number, contextlib.nullcontext()):
            return
    with isolation.names_for_fixture(step.number), contextlib.ExitStack() as ends:
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
    """As much of a fixture's ``request`` as pytest's own code needs."""

    def __init__(self, name: str, add: Callable[..., object]) -> None:
        self.fixturename, self.addfinalizer = name, add
