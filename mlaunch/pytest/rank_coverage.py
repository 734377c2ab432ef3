"""Lines that run on ranks count as those of pytest's process do: by coverage.py, as it was started there.

Each rank records into a file of its own beside the caller's, which is combined with the others of that name, as
pytest-cov does at the end and ``coverage combine`` on request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mlaunch.pytest.crossing import CoveragePlan

_OPTIONS = ("source", "source_pkgs", "branch", "omit", "include", "concurrency", "timid")
_recording: list[tuple[Any, bool]] = []  # of this rank: what records, and whether each test is a context


def plan(config: pytest.Config) -> CoveragePlan | None:
    """Returns how the ranks are to record, if this process does."""
    coverage: Any = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is None:
        return None
    found = {name: current.get_option(f"run:{name}") for name in _OPTIONS}
    options = {
        **{name: value for name, value in found.items() if value},
        "config_file": current.config.config_file or False,
        "data_file": os.path.abspath(current.config.data_file),
        # Each process a file of its own, which pytest-cov combines; a shared one would be overwritten.
        "data_suffix": True,
        "messages": False,
    }
    return CoveragePlan(options, getattr(config.option, "cov_context", None) == "test")


# On the ranks


def start(plan: CoveragePlan, directory: str) -> None:
    """Records from here on, until this rank ends."""
    import coverage

    with _inside(directory):  # what relative names are relative to
        recorder = coverage.Coverage(**plan.options)
    recorder._warn_no_data = False  # these ranks may run tests of something else
    recorder.start()
    _recording[:] = [(recorder, plan.contexts)]
    atexit.register(save)


def enter(test: str, ends: bool | None = None) -> None:
    """Counts what runs from here on for a test, where each test is a context. ``ends``: of one of its fixtures."""
    phase = "run" if ends is None else "teardown" if ends else "setup"
    for recorder, contexts in _recording:
        if contexts:
            recorder.switch_context(f"{test}|{phase}")


def save() -> None:
    """Writes down what was recorded so far."""
    for recorder, _ in _recording:
        recorder.save()


@contextlib.contextmanager
def _inside(directory: str) -> Iterator[None]:
    before = os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
