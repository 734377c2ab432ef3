"""pytest's fixtures that are about their process: each rank has its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, cast

import _pytest.capture
import _pytest.logging
import pytest
from _pytest._io.saferepr import saferepr

from mlaunch.pytest.rank.rank_place import Place
from mlaunch.pytest.rank.rank_request import RankRequest
from mlaunch.pytest.wire.rank_tests import Part, RankTest, RequestFacts

_CAPTURE = "capturemanager"  # pytest's name for it
_TO_DESCRIPTORS = (_pytest.capture.FDCapture, _pytest.capture.FDCaptureBinary)
# True if caplog also has records of loggers that do not propagate.
_HAS_ALL_LOGGERS = hasattr(_pytest.logging.catching_logs, "attached_loggers")


class PerRankFixtures(contextlib.ExitStack):
    """Makes the fixtures that a test asks for, and ends them with it."""

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

    def _recwarn(self) -> pytest.WarningsRecorder:
        return self.enter_context(pytest.WarningsRecorder(_ispytest=True))

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

    def _record(self) -> Callable[[str, object], None]:
        return lambda name, value: self.properties.append((name, value))

    def _subtests(self) -> RankSubtests:
        return RankSubtests(self.parts, self._place)

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
    "recwarn": PerRankFixtures._recwarn,
    "capsys": lambda own: own._capture(_pytest.capture.SysCapture),
    "capsysbinary": lambda own: own._capture(_pytest.capture.SysCaptureBinary),
    "capteesys": lambda own: own._capture(_pytest.capture.SysCapture, tee=True),
    "capfd": lambda own: own._capture(_pytest.capture.FDCapture),
    "capfdbinary": lambda own: own._capture(_pytest.capture.FDCaptureBinary),
    "caplog": PerRankFixtures._caplog,
    "record_property": PerRankFixtures._record,
    "mocker": PerRankFixtures._mocker,
    "subtests": PerRankFixtures._subtests,
    "request": PerRankFixtures._request,
    "pytestconfig": lambda own: own.config,
}
NAMES = frozenset(_MAKE)
