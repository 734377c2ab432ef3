"""Fixtures of pytest's that mean the process they are in: each rank has its own of them."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import _pytest.capture
import _pytest.logging
import pytest

from mlaunch.pytest.crossing import RankTest

_FORMATTER = logging.Formatter("%(levelname)-8s %(name)s:%(filename)s:%(lineno)d %(message)s")  # pytest's own
_HEARS_ALL = hasattr(_pytest.logging.catching_logs, "attached_loggers")  # also what never comes to the root


class RankRequest:
    """What ``request`` is on a rank: the test's name, marks, parameter and configuration; nothing can be asked for."""

    def __init__(self, test: RankTest, config: pytest.Config) -> None:
        self.config = config
        self.node = RankNode(test)
        if test.param is not None:
            self.param = test.param

    def getfixturevalue(self, name: str) -> Any:
        """Raises: fixtures are set up before a test comes to its ranks."""
        raise RuntimeError(f"no fixture can be set up on a rank: name {name!r} among the arguments of the test")


class RankNode:
    """What ``request.node`` is on a rank."""

    def __init__(self, test: RankTest) -> None:
        self.name, self.nodeid = test.name, test.nodeid
        self.own_markers = list(test.marks)

    def iter_markers(self, name: str | None = None) -> list[pytest.Mark]:
        """Returns the marks, of this name or all, the nearest first."""
        return [mark for mark in self.own_markers if name is None or mark.name == name]

    def get_closest_marker(self, name: str, default: pytest.Mark | None = None) -> pytest.Mark | None:
        """Returns the nearest mark of this name."""
        return next(iter(self.iter_markers(name)), default)


class Twins(contextlib.ExitStack):
    """Makes the twins that a test asks for, and ends them with it."""

    def __init__(self, test: RankTest, config: pytest.Config) -> None:
        super().__init__()
        self._test = test
        self._config = config
        self._handler = _pytest.logging.LogCaptureHandler()
        self._handler.setFormatter(_FORMATTER)
        self._catching: list[logging.Logger] = []
        self.properties: list[tuple[str, object]] = []

    def __enter__(self) -> Twins:
        root = logging.getLogger()
        self._catching = [root, *(_apart() if _HEARS_ALL else ())]
        for logger in self._catching:  # torch has forty, and their own way to add one takes a lock
            logger.handlers.append(self._handler)
        self.callback(self._catch_no_more)
        level = getattr(logging, str(self._config.getini("log_level") or "NOTSET").upper(), 0)
        if level:
            self._handler.setLevel(level)
            self.callback(root.setLevel, root.level)
            root.setLevel(min(root.level, level))
        return self

    def _catch_no_more(self) -> None:
        for logger in self._catching:
            if self._handler in logger.handlers:  # the test may have removed it
                logger.handlers.remove(self._handler)

    @property
    def logged(self) -> str:
        """What the test has logged."""
        return str(self._handler.stream.getvalue()).strip()

    def make(self) -> dict[str, Any]:
        """Returns the twins, by name."""
        return {name: _MAKE[name](self) for name in self._test.twins}

    def _monkeypatch(self) -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        self.callback(patch.undo)
        return patch

    def _recwarn(self) -> pytest.WarningsRecorder:
        return self.enter_context(pytest.WarningsRecorder(_ispytest=True))

    def _capture(self, kind: type[Any]) -> pytest.CaptureFixture[Any]:
        capture: pytest.CaptureFixture[Any] = pytest.CaptureFixture(kind, self._request(), _ispytest=True)  # type: ignore[arg-type]
        capture._start()
        self.callback(capture.close)
        return capture

    def _caplog(self) -> pytest.LogCaptureFixture:
        item: Any = types.SimpleNamespace(stash=pytest.Stash(), config=self._config)
        item.stash[_pytest.logging.caplog_handler_key] = self._handler
        item.stash[_pytest.logging.caplog_records_key] = {"call": self._handler.records}
        caplog = pytest.LogCaptureFixture(item, _ispytest=True)
        self.callback(caplog._finalize)
        return caplog

    def _record(self) -> Callable[[str, object], None]:
        return lambda name, value: self.properties.append((name, value))

    def _request(self) -> RankRequest:
        return RankRequest(self._test, self._config)


def _apart() -> Iterator[logging.Logger]:
    """Yields the loggers whose records do not come to the root."""
    for one in list(logging.root.manager.loggerDict.values()):
        if not getattr(one, "propagate", True) and isinstance(one, logging.Logger):
            yield one


_MAKE: dict[str, Callable[[Twins], Any]] = {
    "monkeypatch": Twins._monkeypatch,
    "recwarn": Twins._recwarn,
    "capsys": lambda twins: twins._capture(_pytest.capture.SysCapture),
    "capsysbinary": lambda twins: twins._capture(_pytest.capture.SysCaptureBinary),
    "capfd": lambda twins: twins._capture(_pytest.capture.FDCapture),
    "capfdbinary": lambda twins: twins._capture(_pytest.capture.FDCaptureBinary),
    "caplog": Twins._caplog,
    "record_property": Twins._record,
    "request": Twins._request,
    "pytestconfig": lambda twins: twins._config,
}
NAMES = frozenset(_MAKE)
