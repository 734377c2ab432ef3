"""What of a test that was set up in pytest's process goes to its ranks, and what is made there instead."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mlaunch.protocol import payload
from mlaunch.pytest import twins
from mlaunch.pytest.crossing import Definition

_PYTESTS = "_pytest"  # where what pytest makes itself is defined
_TRAVELS = {"tmpdir", "testpath"}  # of that
_SHOWN = 100  # characters


def split(item: pytest.Function) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the values of the test's arguments that travel, and the names of those that are made on the ranks.

    Raises:
        pytest.fail.Exception: One of them is of use in pytest's process alone.
    """
    values, made = {}, []
    for name in item._fixtureinfo.argnames:
        value = item.funcargs[name]
        if not _is_pytests(value) or name in _TRAVELS:
            values[name] = value
        elif name in twins.NAMES:
            made.append(name)
        else:
            raise pytest.fail.Exception(
                f"the fixture {name!r} is of use in pytest's process alone, and this test runs on ranks; "
                f"use it in a fixture of yours, and give the test what that returns",
                pytrace=False,
            )
    return values, tuple(made)


def _is_pytests(value: object) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == _PYTESTS


def who_cannot(values: dict[str, Any]) -> str:
    """Names the first value that cannot be pickled; "" if all can."""
    for name, value in values.items():
        try:
            payload.pack(value, "value", most=0).close()
        except Exception as error:  # whatever a __reduce__ may raise
            kind = type(value).__qualname__
            return (
                f"the fixture {name!r} gives a {kind}, which cannot travel to the ranks "
                f"({type(error).__name__}: {str(error)[:_SHOWN]}); make it there: @mlaunch.pytest.rank_fixture"
            )
    return ""


def definition_of(item: pytest.Function) -> Definition:
    """Says where the ranks find the test."""
    owner = "" if item.cls is None else f"{item.cls.__qualname__}."
    name = item.originalname or item.name.partition("[")[0]
    return found_at(item.config, item.module, f"{owner}{name}")


def found_at(config: pytest.Config, module: Any, qualname: str) -> Definition:
    """Says where the ranks find what a module defines."""
    file = str(module.__file__)
    return Definition(module.__name__, file, qualname, _conftests(config.pluginmanager, os.path.dirname(file)))


@functools.lru_cache(None)
def _conftests(manager: pytest.PytestPluginManager, directory: str) -> tuple[tuple[str, str], ...]:
    found = []
    for plugin in manager.get_plugins():
        file = getattr(plugin, "__file__", None) or ""
        if Path(file).name == "conftest.py" and Path(directory).is_relative_to(Path(file).parent):
            found.append((str(plugin.__name__), file))
    return tuple(sorted(found, key=lambda named: len(named[1])))


def marks_of(item: pytest.Item, *, every: bool) -> tuple[pytest.Mark, ...]:
    """Returns the marks that travel: those that filter warnings, or ``every`` one that can be pickled."""
    if not every:
        return tuple(item.iter_markers("filterwarnings"))
    return tuple(_picklable(item.iter_markers()))


def _picklable(marks: Iterable[pytest.Mark]) -> Iterable[pytest.Mark]:
    for mark in marks:
        try:
            pickle.dumps(mark)
        except Exception:  # whatever a __reduce__ may raise
            continue
        yield mark


def plain_options(config: pytest.Config) -> dict[str, Any]:
    """Returns the options that any process understands; not those that ask for plugins or a debugger."""
    left_out = {"plugins", "usepdb", "trace", "file_or_dir", "numprocesses", "dist", "tx", "inifilename", "rootdir"}
    found = {}
    for name, value in vars(config.option).items():
        if name not in left_out and _is_plain(value):
            found[name] = value
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in {str, int, float, bool}


def explaining(config: pytest.Config) -> tuple[str, ...]:
    """Names the installed plugins that explain comparisons."""
    hook: Callable[..., Any] = config.hook.pytest_assertrepr_compare
    plugins = [found.plugin for found in hook.get_hookimpls()]  # type: ignore[attr-defined]
    names = [str(getattr(plugin, "__name__", "")) for plugin in plugins if hasattr(plugin, "__file__")]
    return tuple(name for name in names if not name.startswith(_PYTESTS) and name.rpartition(".")[2] != "conftest")
