"""The plugin that pytest loads: the mark and the options, and the rest once a test has the mark.

Loading it imports neither torch nor the launcher, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mlaunch.base.exceptions import report_of
from mlaunch.pytest.caller.mark import CI_COMMAND, NAME, PROPERTIES, SIZE, WANTED, parametrize, read_mark

RUNNER = "mlaunch-ranks"
_IN_SOURCE = b"mark.ranks"  # of a file whose tests are likely to have it


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests on ranks."""
    group = parser.getgroup("mlaunch", "tests on ranks")
    group.addoption("--ranks-fresh", action="store_true", help="start new ranks for each test: finds who leaked")
    group.addoption("--ranks-require", action="store_true", help="too few devices for a test: an error, not a skip")
    group.addoption("--ranks-deadline", type=float, metavar="SECONDS", help="limit for each test on ranks")
    parser.addini("ranks_deadline", "limit for each test on ranks, in seconds", default="120")
    parser.addini("ranks_memory", "MiB by which ranks may grow before new ones replace them", default="1024")
    parser.addini("ranks_reserve", "start ranks ahead that replace those that a test loses", type="bool", default=True)
    parser.addini("ranks_early", "start the fork server while tests are collected", type="bool", default=True)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        f"{NAME}(*sizes, backend=None, device_type='cpu', deadline=None, fresh=False, numa=None, numa_memory=None): "
        "run the test on this many ranks, once for each size",
    )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start the fork server before pytest imports a file with the mark: both then import torch at the same time."""
    config = parent.config
    if not config.getini("ranks_early") or _is_controller(config) or config.getoption("collectonly"):
        return
    # A guess from the text: only the import could tell, and that is to run at the same time.
    if _IN_SOURCE in module_path.read_bytes():
        from mlaunch.pytest.caller.new_ranks import start_server

        start_server()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each size, if the mark has several."""
    parametrize(metafunc)


@pytest.fixture(name=SIZE)
def _size(request: pytest.FixtureRequest) -> int:
    """The number of ranks of this test, if the mark has several sizes."""
    return int(request.param)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Read the mark, and register a marked test with the rest of the plugin."""
    _register(item)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Read the marks that hooks of conftest.py have added, before pytest selects by marks."""
    for item in items:
        _register(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Read the marks of hooks that come last."""
    for item in session.items:
        _register(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on its ranks if it has the mark. Read the mark again: one of its fixtures may have added it."""
    _register(pyfuncitem)
    if pyfuncitem.stash.get(WANTED, None) is None:
        return None
    runner: Any = pyfuncitem.config.pluginmanager.get_plugin(RUNNER)
    runner.run(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note why a launch failed that a test without the mark has made."""
    if call.when == "setup":  # the test may run for the second time
        item.user_properties[:] = [one for one in item.user_properties if not one[0].startswith(PROPERTIES)]
    report = yield
    failed = None if call.excinfo is None else report_of(call.excinfo.value)
    if failed is not None and item.stash.get(WANTED, None) is None:
        from mlaunch.pytest.caller.judgement import facts_of_launch, note_facts

        note_facts(item, report, facts_of_launch(failed.as_dict()))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what a CI service shows of failures in ranks, also in xdist's workers."""
    for report in (one for outcome in ("failed", "error") for one in terminalreporter.stats.get(outcome, ())):
        if command := getattr(report, CI_COMMAND, ""):
            terminalreporter.write_line(command)


def _register(item: pytest.Item) -> None:
    if not read_mark(item):
        return
    runner: Any = item.config.pluginmanager.get_plugin(RUNNER)
    if runner is None:
        from mlaunch.pytest.caller.runner import Runner

        # Only now: a suite without the mark does not import torch.
        runner = Runner(item.config)
        item.config.pluginmanager.register(runner, RUNNER)
    runner.prepare(item)


def _is_controller(config: pytest.Config) -> bool:
    """True if xdist's workers run the tests, not this process."""
    return not hasattr(config, "workerinput") and bool(getattr(config.option, "numprocesses", None))
