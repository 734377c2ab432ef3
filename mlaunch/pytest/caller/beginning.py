"""The beginning of new ranks: they get pytest's options and settings, and how to record coverage."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mlaunch.pytest.wire.rank_tests import Beginning, CoveragePlan

# What asks for plugins, a debugger, or other processes.
_LEFT_OUT = {"plugins", "usepdb", "trace", "file_or_dir", "numprocesses", "dist", "tx", "inifilename", "rootdir"}
_COVERAGE = ("source", "source_pkgs", "branch", "omit", "include", "concurrency", "timid")


def beginning_of(config: pytest.Config, size: int, board: int, log: int) -> Beginning:
    """Return what new ranks get. ``board``, ``log``: descriptors of this process."""
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
    """Return the plain values of the configuration file, and the defaults of what it does not have."""
    found = {}
    for name in getattr(config._parser, "_inidict", {}):
        with contextlib.suppress(Exception):  # the file has it wrong, and nobody has asked for it
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
    """Return how ranks record the lines that run: as coverage.py does in this process. None if it does not."""
    coverage: Any = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is None:
        return None
    found = {name: current.get_option(f"run:{name}") for name in _COVERAGE}
    options = {
        **{name: value for name, value in found.items() if value},
        "config_file": current.config.config_file or False,
        "data_file": os.path.abspath(current.config.data_file),
        # Each process a file of its own, which pytest-cov combines; a shared one would be overwritten.
        "data_suffix": True,
        "messages": False,
    }
    return CoveragePlan(options, getattr(config.option, "cov_context", None) == "test")
