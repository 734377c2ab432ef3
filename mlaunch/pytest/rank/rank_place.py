"""Where on this rank a test or fixture is, and how what it raises becomes a verdict."""

from __future__ import annotations

import itertools
import time
import traceback
import unittest
from typing import Any

import pytest

from mlaunch.base.frames import is_library
from mlaunch.protocol import explain
from mlaunch.pytest.rank.explanation import Explanation
from mlaunch.pytest.wire.rank_barrier import RankBarrier
from mlaunch.pytest.wire.rank_tests import Verdict

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (pytest.skip.Exception, "skipped"),
    (unittest.SkipTest, "skipped"),
    (pytest.xfail.Exception, "xfailed"),
    (pytest.exit.Exception, "exit"),
)
_MOST_PLACES = 20  # also of a recursion without end


class Place:
    """The module, class, instance and function of a test or fixture. ``number``: the test's."""

    def __init__(self, number: int, barrier: RankBarrier, explanation: Explanation) -> None:
        self.module: Any = None
        self.owner: type | None = None
        self.instance: Any = None
        self.function: Any = None
        self._number, self._barrier, self._explanation = number, barrier, explanation
        self._left = 0  # parts

    def describe(self, error: BaseException) -> Verdict:
        """Return the verdict on a test that has raised this."""
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
