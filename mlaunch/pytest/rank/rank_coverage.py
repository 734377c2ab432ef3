"""coverage.py on ranks: lines that run there count as those in pytest's process do.

Each rank records into a file of its own beside that of pytest's process. pytest-cov combines these files at the end,
``coverage combine`` on request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from mlaunch.pytest.wire.rank_tests import CoveragePlan

_recording: list[tuple[Any, bool]] = []  # of this rank: the recorder, and True if each test is a context


def start(plan: CoveragePlan, directory: str) -> None:
    """Record from here on, until this rank ends."""
    import coverage

    with _inside(directory):  # what relative names are relative to
        recorder = coverage.Coverage(**plan.options)
    recorder._warn_no_data = False  # these ranks may run tests of something else
    recorder.start()
    _recording[:] = [(recorder, plan.contexts)]
    atexit.register(save)


def enter(test: str, ends: bool | None = None) -> None:
    """Record what runs from here on for this test, if each test is a context. ``ends``: one of its fixtures does."""
    phase = "run" if ends is None else "teardown" if ends else "setup"
    for recorder, contexts in _recording:
        if contexts:
            recorder.switch_context(f"{test}|{phase}")


def save() -> None:
    """Write to the file what was recorded so far."""
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
