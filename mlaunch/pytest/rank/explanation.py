"""pytest's own explanations in a rank: rewritten assertions, differences of compared values, tracebacks.

For these a rank makes a configuration like that of pytest's process, before it imports a test's module. What a test
or fixture raises becomes a verdict with them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import os
import sys
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import create_terminal_writer
from _pytest.unittest import TestCaseFunction

from mlaunch.base.frames import is_library
from mlaunch.protocol import explain
from mlaunch.pytest.wire import Beginning, Definition, RankBarrier, Verdict

_NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
_TERMINAL = "terminalreporter"  # pytest's name for it


class Explanation:
    """The configuration of one rank, and the modules that it has imported for tests."""

    def __init__(self, beginning: Beginning) -> None:
        with _quietly(beginning.directory):
            self.config = _configured(beginning)
            _bind_comparisons(self.config)
        self._conftests: set[str] = set()
        self._rewritten: tuple[str, ...] = ()

    def function_of(self, definition: Definition) -> tuple[Callable[..., Any], type | None]:
        """Return the test's function, and the class that it is found in; import what it needs."""
        owner, _, name = definition.qualname.rpartition(".")
        holder = self.found(definition, owner)
        function: Callable[..., Any] = getattr(holder, name)
        return function, holder if isinstance(holder, type) else None

    def rewrite(self, names: tuple[str, ...]) -> None:
        """Rewrite the assertions of these modules on import, as in pytest's process."""
        if names == self._rewritten:
            return
        with warnings.catch_warnings():  # pytest warns of modules that are imported already
            warnings.simplefilter("ignore")
            pytest.register_assert_rewrite(*names)
        self._rewritten = names

    def found(self, definition: Definition, path: str) -> Any:
        """Return the object at a dotted path in the module of a definition; the module itself for ""."""
        for name, file in definition.conftests:
            self._take_conftest(name, file)
        found: Any = _module(definition.module, definition.file)
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
        return found

    def _take_conftest(self, name: str, file: str) -> None:
        if file not in self._conftests:
            self._conftests.add(file)
            module = _module(name, file)
            if hasattr(module, "pytest_assertrepr_compare") or hasattr(module, "pytest_addoption"):
                with contextlib.suppress(Exception):  # it may need plugins that ranks do not load
                    self.config.pluginmanager.register(module, file)

    def of_error(
        self, error: BaseException, function: Callable[..., Any] | None, owner: type | None
    ) -> tuple[Any, tuple[str, int] | None]:
        """Return what pytest shows of an exception of a function, and where it was raised."""
        excinfo = pytest.ExceptionInfo.from_exception(error)
        is_case = owner is not None and issubclass(owner, unittest.TestCase)
        item: Any = object.__new__(TestCaseFunction if is_case else pytest.Function)  # its constructor sets up fixtures
        item.config = self.config
        if function is not None:  # else the module itself has raised
            item._obj = function
        shown = item.repr_failure(excinfo)
        crash = getattr(shown, "reprcrash", None)
        return shown, None if crash is None else (str(crash.path), int(crash.lineno))


def _configured(beginning: Beginning) -> pytest.Config:
    """Return a configuration with pytest's options, but few of its plugins."""
    # addopts and required_plugins took effect in pytest's process, and may name plugins that are not loaded here.
    args = ["--rootdir", beginning.rootdir, "--noconftest"]
    for override in [*(beginning.options.get("override_ini") or ()), "addopts=", "required_plugins="]:
        args += ["-o", override]
    args += ["-c", beginning.ini] if beginning.ini is not None else []
    config = pytest.Config.fromdictargs({**beginning.options, "plugins": []}, [*args, beginning.rootdir])
    config.option.__dict__.update(beginning.options)
    getattr(config._parser if hasattr(config._parser, "_opt2dest") else config, "_opt2dest", {}).update(beginning.flags)
    config._inicache.update(beginning.settings)
    for name in beginning.plugins:
        with contextlib.suppress(Exception):
            config.pluginmanager.import_plugin(name)
    config.pluginmanager.register(RankTerminal(config, colored=beginning.colored), _TERMINAL)
    return config


class RankTerminal:
    """In place of pytest's terminal, for which comparisons are coloured; nothing is written to it.

    pytest 8 asks for its writer even if there is no terminal.
    """

    def __init__(self, config: pytest.Config, *, colored: bool) -> None:
        self._tw = create_terminal_writer(config, io.StringIO())
        self._tw.hasmarkup = colored


def _bind_comparisons(config: pytest.Config) -> None:
    """Have pytest's own code bind assertions to the hook that explains comparisons, for as long as the rank lives."""
    import _pytest.assertion

    around = _pytest.assertion.pytest_runtest_protocol(types.SimpleNamespace(config=config, ihook=config.hook))  # type: ignore[arg-type]
    next(around)
    _kept.append(around)


_kept: list[object] = []  # generators, which would unbind as they are collected


@contextlib.contextmanager
def _quietly(directory: str) -> Iterator[None]:
    """Change to pytest's directory; load no installed plugins and show no warnings meanwhile."""
    before, there = os.environ.get(_NO_PLUGINS), os.getcwd()
    # Installed plugins may start servers, take locks, or write files, once for each rank.
    os.environ[_NO_PLUGINS] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(OSError):
                os.chdir(directory)
            yield
    finally:
        os.chdir(there)
        os.environ.pop(_NO_PLUGINS)
        if before is not None:
            os.environ[_NO_PLUGINS] = before


# Modules


def _module(name: str, file: str) -> types.ModuleType:
    """Return the module of a file, under its name in pytest's process, whatever the import mode."""
    found = sys.modules.get(name)
    if found is not None and _is_of(found, file):
        return found
    pytest.register_assert_rewrite(name)  # its name may not match python_files
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        spec = importlib.util.find_spec(name) if found is None else None
        if spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file):
            return importlib.import_module(name)
    return _from_file(name, file)


def _is_of(module: types.ModuleType, file: str) -> bool:
    return getattr(module, "__file__", None) == file


def _from_file(name: str, file: str) -> types.ModuleType:
    for finder in sys.meta_path:  # the first is the one that rewrites
        spec = finder.find_spec(name, [str(Path(file).parent)])
        if spec is not None and spec.loader is not None and spec.origin == file:
            break
    else:
        spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported as a module", name=name)
    module = importlib.util.module_from_spec(spec)
    # Before it is executed, as the import system does: it may import itself, and dataclasses look it up here.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


# Verdicts

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (pytest.skip.Exception, "skipped"),
    (unittest.SkipTest, "skipped"),
    (pytest.xfail.Exception, "xfailed"),
    (pytest.exit.Exception, "exit"),
)
_MOST_PLACES = 20  # also of a recursion without end


class Place:
    """The module, class, instance and function of a test or fixture on this rank. ``number``: the test's."""

    def __init__(self, number: int, barrier: RankBarrier, explanation: Explanation) -> None:
        self.module: Any = None
        self.owner: type | None = None
        self.instance: Any = None
        self.function: Any = None
        self._number, self._barrier, self._explanation = number, barrier, explanation
        self._left = 0  # parts

    def describe(self, error: BaseException) -> Verdict:
        """Return the verdict on a test that has raised this exception."""
        kind = kind_of(error)
        reason = str(getattr(error, "msg", None) or error)
        longrepr, crash = self._explanation.of_error(error, self.function, self.owner)
        if isinstance(error, unittest.SkipTest):
            crash = None  # raised where unittest, or mlaunch for it, reports it
        pickled = None if kind in {"skipped", "xfailed"} else explain.pickle_exception(error)
        return Verdict(
            kind, time.monotonic(), reason, None if kind == "skipped" else longrepr, pickled, crash, _places(error)
        )

    def leave_part(self, *, failed: bool) -> bool:
        """Note that this rank has left a part of the test. False if it failed there and others are still in it."""
        self._left += 1
        self._barrier.leave_part(self._number, self._left)
        return not failed or self._barrier.all_left_part(self._number, self._left)


def kind_of(error: BaseException) -> str:
    """Return the outcome that an exception means: skipped, xfailed, exit or failed."""
    return next((word for exception, word in _KINDS if isinstance(error, exception)), "failed")


def _places(error: BaseException) -> tuple[tuple[str, int], ...]:
    """Return the frames of an exception that are in the user's files, the innermost first."""
    found = [(step.f_code.co_filename, line) for step, line in traceback.walk_tb(error.__traceback__)]
    theirs = (place for place in reversed(found) if not (is_library(place[0]) or place[0].startswith("<")))
    return tuple(itertools.islice(theirs, _MOST_PLACES))
