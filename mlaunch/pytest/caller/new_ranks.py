"""The start of new ranks: imports of the fork server, pytest's options and settings, and a plan for coverage.

Beside other workers of pytest-xdist they get a share of the cores, and accelerators that their worker leases.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.config import default_plugins

from mlaunch.caller import interrupts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.warm_server import warm_server
from mlaunch.pytest.caller.mark import Shape
from mlaunch.pytest.wire import Beginning, CoveragePlan
from mlaunch.rank import device

if TYPE_CHECKING:
    from mlaunch.leases.caller import LeaseRequest
    from mlaunch.leases.caller.acquisition import Acquisition, DeviceLease

PRELOADED = (
    "pytest",
    "mlaunch.pytest.rank.run_test",
    "mlaunch.pytest.caller.rank_fixtures",  # modules of tests import it
    "mlaunch.comm.rank.exchange",
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


# Shares of workers of pytest-xdist

_THREADS = "OMP_NUM_THREADS"
_WORKER = "PYTEST_XDIST_WORKER"
_TERM = 10.0  # seconds that a worker keeps devices that others wait for: new ranks take seconds to start on them


def count_workers() -> int:
    """Return how many workers run tests at the same time; 1 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_of_cores(size: int) -> dict[str, str]:
    """Return the variables that give each rank its share of the cores; none without other workers."""
    if count_workers() == 1 or _THREADS in os.environ:
        return {}
    return {_THREADS: str(device.threads_of(size * count_workers()))}


def warn_of_cores(shape: Shape) -> None:
    """Warn if all workers together have more ranks than cores. Only the first worker warns, as its ranks begin."""
    cores, first = device.usable_cpus(), os.environ.get(_WORKER) == "gw0"
    if first and shape.device_type == "cpu" and count_workers() * shape.size > cores:
        told = (
            f"{count_workers()} workers with {shape.size} ranks each share {cores} cores, and wait for each other; "
            f"-n {max(1, cores // shape.size)} is likely to be faster"
        )
        warnings.warn(pytest.PytestWarning(told), stacklevel=1)


class WorkerDevices:
    """The accelerators of one set of ranks, which no other worker uses meanwhile; none for ranks on CPUs.

    ``devices``: their numbers; ``environ``: the variables by which ranks know them.
    """

    def __init__(self, shape: Shape, patience: float) -> None:
        """Wait up to ``patience`` seconds for as many devices as a shape needs.

        Raises:
            ValueError: This machine does not have so many.
            pytest.fail.Exception: Others kept them for that long.
        """
        self.devices: Sequence[int] | None = None
        self.environ: Mapping[str, str] = {}
        self._lease: DeviceLease | None = None
        if count_workers() == 1 or shape.device_type == "cpu":
            return
        from mlaunch.leases.caller import request_of  # which few sessions need

        options = Options().replaced({"n_gpus": shape.size, "device_type": shape.device_type, "lease": True})
        name = f"pytest's worker {os.environ.get(_WORKER, '')}"
        request = request_of(options, warm_server.get(os.environ), os.environ, name)
        if request.numbers is not None:  # else the ranks are on CPUs
            # One set at a time: two workers that keep devices and wait for more could wait for each other.
            self._lease = _wait(request, patience)
            granted = request.granted(self._lease)
            self.devices = granted.options.devices
            self.environ = {name: granted.environ[name] for name in granted.of_call}
        self._since = time.monotonic()

    def are_due(self) -> bool:
        """True if another worker waits for these devices, and this one has had them for long enough."""
        if self._lease is None or time.monotonic() - self._since < _TERM:
            return False
        from mlaunch.leases.caller.acquisition import standing
        from mlaunch.leases.caller.lease_directory import place

        names = set(self._lease.names)
        return any(names & set(waiting.get("names", ())) for waiting in standing(place(os.environ))[1])

    def close(self) -> None:
        """Give the devices back."""
        if self._lease is not None:
            self._lease.close()


def _wait(request: LeaseRequest, patience: float) -> DeviceLease:
    acquisition = request.begin()
    end = time.monotonic() + patience
    try:
        while (lease := acquisition.step()) is None:
            if (left := end - time.monotonic()) <= 0:
                raise pytest.fail.Exception(_told(request, acquisition, patience), pytrace=False)
            interrupts.wait_readable(acquisition.fds(), min(left, acquisition.timeout() or left))
    finally:
        acquisition.close()
    try:
        for delay in request.memory_back(lease):
            interrupts.wait_readable(delay.fds, delay.timeout)
    except BaseException:
        lease.close()
        raise
    return lease


def _told(request: LeaseRequest, acquisition: Acquisition, patience: float) -> str:
    return (
        f"{request.waits_for(acquisition)}: it did not get them within {patience:g} s (ranks_deadline for each of "
        f"{count_workers()} workers); run fewer workers (-n), or see who has the devices: mlaunch ps"
    )
