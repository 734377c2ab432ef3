"""The start of new ranks: imports of the fork server, pytest's options and settings, and a plan for coverage."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.config import default_plugins

from mlaunch.caller.server.warm_server import warm_server
from mlaunch.pytest.wire import Beginning, CoveragePlan

PRELOADED = (
    "pytest",
    "mlaunch.pytest.rank.run_test",
    "mlaunch.pytest.caller.rank_fixtures",  # modules of tests import it
    "mlaunch.comm.rank.exchange",
    "mlaunch.comm.rank.local_group",
)
# For the configuration that each rank makes. These imports took more than half of a new rank's time.
_PYTESTS = tuple(f"_pytest.{name}" for name in default_plugins)
_SEEDED = "numpy.random"  # which is seeded before each test; numpy itself imports it late
_RECORDER = "coverage"  # ranks import it if this process has imported it
# Options that ask for plugins, a debugger, or other processes.
_LEFT_OUT = {"plugins", "usepdb", "trace", "file_or_dir", "numprocesses", "dist", "tx", "inifilename", "rootdir"}
_COVERAGE = ("source", "source_pkgs", "branch", "omit", "include", "concurrency", "timid")


def preload() -> None:
    """Have the fork server import what ranks of tests need, unless it runs already."""
    if not warm_server.started:
        numpy = (_SEEDED,) if importlib.util.find_spec("numpy") is not None else ()
        wanted = (*PRELOADED, *_PYTESTS, *numpy, *((_RECORDER,) if _RECORDER in sys.modules else ()))
        warm_server.preload = (*warm_server.preload, *(name for name in wanted if name not in warm_server.preload))


def start_server() -> None:
    """Start the fork server, with these imports; do not wait for it."""
    preload()
    warm_server.get(os.environ)


def beginning_of(config: pytest.Config, size: int, board: int, log: int) -> Beginning:
    """Return the first message to new ranks. ``board``, ``log``: descriptors of this process."""
    # By path: ranks are forks of another process, and have none of our descriptors.
    here = f"/proc/{os.getpid()}/fd"
    return Beginning(
        directory=str(config.invocation_params.dir),
        rootdir=str(config.rootpath),
        ini=None if config.inipath is None else str(config.inipath),
        options={name: one for name, one in vars(config.option).items() if name not in _LEFT_OUT and _is_plain(one)},
        flags=_flags(config),
        settings=_settings(config),
        plugins=_explaining_plugins(config),
        board=f"{here}/{board}",
        log=f"{here}/{log}",
        size=size,
        coverage=coverage_plan(config),
        colored=_is_colored(config),
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in {str, int, float, bool}


def _flags(config: pytest.Config) -> dict[str, str]:
    """Return the names of options by their flags, also those of plugins that ranks do not load."""
    known = config._parser if hasattr(config._parser, "_opt2dest") else config  # the latter before pytest 9
    return dict(getattr(known, "_opt2dest", {}))


def _settings(config: pytest.Config) -> dict[str, Any]:
    """Return the plain settings: from the configuration file, or the defaults."""
    found = {}
    for name in getattr(config._parser, "_inidict", {}):
        with contextlib.suppress(Exception):  # a wrong value of a setting that nobody reads
            if _is_plain(value := config.getini(name)):
                found[name] = value
    return found


def _explaining_plugins(config: pytest.Config) -> tuple[str, ...]:
    """Return the names of installed plugins that explain comparisons."""
    hook: Callable[..., Any] = config.hook.pytest_assertrepr_compare
    plugins = [found.plugin for found in hook.get_hookimpls()]  # type: ignore[attr-defined]
    names = [str(getattr(plugin, "__name__", "")) for plugin in plugins if hasattr(plugin, "__file__")]
    return tuple(name for name in names if not name.startswith("_pytest") and name.rpartition(".")[2] != "conftest")


def _is_colored(config: pytest.Config) -> bool:
    """True if pytest's terminal shows colours."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return reporter is not None and bool(reporter._tw.hasmarkup)


def coverage_plan(config: pytest.Config) -> CoveragePlan | None:
    """Return how ranks record the lines that run, as coverage.py does here; None if it does not run here."""
    coverage: Any = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is None:
        return None
    found = {name: current.get_option(f"run:{name}") for name in _COVERAGE}
    options = {
        **{name: value for name, value in found.items() if value},
        "config_file": current.config.config_file or False,
        "data_file": os.path.abspath(current.config.data_file),
        # A file for each process, which pytest-cov combines: they would overwrite a shared one.
        "data_suffix": True,
        "messages": False,
    }
    return CoveragePlan(options, getattr(config.option, "cov_context", None) == "test")
