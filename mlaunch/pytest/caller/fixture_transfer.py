"""What of a test that was set up in pytest's process goes to its ranks, and what is made there instead."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pickle
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from mlaunch.protocol import explain, payload
from mlaunch.pytest.rank import per_rank_fixtures
from mlaunch.pytest.wire.rank_tests import Definition, RankTest

_PYTESTS = ("_pytest", "pytest_mock")  # where what pytest makes itself is defined
_TRAVELS = {"tmpdir", "testpath"}  # of that
_SHOWN = 100  # characters


def split(item: pytest.Function) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the values of the test's arguments that travel, and the names of those that are made on the ranks.

    Raises:
        pytest.fail.Exception: One of them is of use in pytest's process alone.
    """
    return split_values(
        {name: item.funcargs[name] for name in item._fixtureinfo.argnames}, "this test", per_rank_fixtures.NAMES
    )


def split_values(
    found: dict[str, Any], asker: str, on_ranks: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Do the same for the arguments of a test or fixture. ``on_ranks``: which of pytest's there are."""
    values, made = {}, []
    for name, value in found.items():
        if not _is_pytests(value) or name in _TRAVELS:
            values[name] = value
        elif name in on_ranks:
            made.append(name)
        else:
            raise pytest.fail.Exception(
                f"the fixture {name!r} is of use in pytest's process alone, and {asker} runs on ranks; "
                f"use it in a fixture of yours, and give the test what that returns",
                pytrace=False,
            )
    return values, tuple(made)


def _is_pytests(value: object) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] in _PYTESTS


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


def state_that_cannot(test: RankTest) -> str:
    """Name the first attribute of the test's instance that cannot be pickled; "" if all can."""
    told = (attribute_that_cannot(f"self.{name}", value) for name, value in (test.state or {}).items())
    return next(filter(None, told), "")


def attribute_that_cannot(where: str, value: object) -> str:
    """Say why an attribute cannot travel, and what to do; "" if it can. ``where``: as in "self.lock"."""
    try:
        payload.check(value)
    except Exception as error:  # whatever a __reduce__ may raise
        return (
            f"{explain.unpicklable(value, where)}, which cannot travel to the ranks "
            f"({type(error).__name__}: {str(error)[:_SHOWN]}); "
            f"make it in the test, or there: @mlaunch.pytest.rank_fixture"
        )
    return ""


def rewritten(config: pytest.Config) -> tuple[str, ...]:
    """Name the modules whose assertions explain themselves by request: plugins, and what conftest.py registers."""
    hook = getattr(config.pluginmanager, "rewrite_hook", None)
    names: Iterable[str] = getattr(hook, "_must_rewrite", ())
    return _rewritten(frozenset(names))


@functools.lru_cache(4)
def _rewritten(names: frozenset[str]) -> tuple[str, ...]:
    installed = {file.parts[0].removesuffix(".py") for file in _files_of_plugins()}
    return tuple(sorted(name for name in names if name.partition(".")[0] not in installed))


@functools.lru_cache(1)
def _files_of_plugins() -> list[Path]:
    """Return the files of installed plugins, whose assertions are of no interest on ranks."""
    found = importlib.metadata.distributions()
    plugins = (one for one in found if any(point.group == "pytest11" for point in one.entry_points))
    return [Path(str(file)) for one in plugins for file in one.files or ()]


def definition_of(item: pytest.Function) -> Definition:
    """Says where the ranks find the test."""
    # By the names under which pytest has found it: a class may have another one of its own (an alias, one that a
    # function has made).
    owners = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    name = item.originalname or item.name.partition("[")[0]
    return found_at(item.config, item.module, ".".join([*owners, name]))


def found_at(config: pytest.Config, module: Any, qualname: str) -> Definition:
    """Says where the ranks find what a module defines."""
    file = getattr(module, "__file__", None)
    if file is None:
        told = f"the module {module.__name__!r} has no file, and ranks import the module of a test: write it to one"
        raise pytest.fail.Exception(told, pytrace=False)
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


def flags(config: pytest.Config) -> dict[str, str]:
    """Return the names of options by their flags: of plugins that ranks do not load, too."""
    known = config._parser if hasattr(config._parser, "_opt2dest") else config  # the latter before pytest 9
    return dict(getattr(known, "_opt2dest", {}))


def settings(config: pytest.Config) -> dict[str, Any]:
    """Return the plain values of the configuration file, and the defaults of what it does not have."""
    found = {}
    for name in getattr(config._parser, "_inidict", {}):
        with contextlib.suppress(Exception):  # one that the file has wrong, and nobody has asked for
            if _is_plain(value := config.getini(name)):
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
    return tuple(name for name in names if not name.startswith("_pytest") and name.rpartition(".")[2] != "conftest")
