"""Lines that run on ranks count as those of pytest's process do: by coverage.py, as it was started there.

Each rank records into a file of its own beside the caller's, which is combined with the others of that name, as
pytest-cov does at the end and ``coverage combine`` on request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from mlaunch.pytest.wire.rank_tests import CoveragePlan

_recording: list[tuple[Any, bool]] = []  # of this rank: what records, and whether each test is a context


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
