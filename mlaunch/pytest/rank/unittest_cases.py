"""Methods of ``unittest.TestCase`` on ranks: all of a test but its report runs there.

The instance is made on each rank, since pytest's cannot be pickled. ``setUpClass`` runs on
the ranks before the first method of its class, ``tearDownClass`` after the last, before one of another class.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from types import TracebackType
from typing import Any
from unittest.case import _subtest_msg_sentinel  # type: ignore[attr-defined]

import pytest
from _pytest._io.saferepr import saferepr
from _pytest.unittest import TestCaseFunction

from mlaunch.pytest.rank import group_names, torch_cases
from mlaunch.pytest.rank.rank_place import Place
from mlaunch.pytest.wire.rank_tests import Part

# True if pytest reports subtests of unittest. With an older Python it asks the instance for them.
REPORTS_PARTS = hasattr(TestCaseFunction, "addSubTest") and sys.version_info >= (3, 11)
_begun: list[type[unittest.TestCase]] = []  # of this rank: the class that is set up, or none


class FirstProblem(unittest.TestResult):
    """Keeps what pytest reports: of several problems the first. ``parts``: where subtests are noted."""

    def __init__(self, parts: list[Part], place: Place) -> None:
        super().__init__()
        self.found: BaseException | None = None
        self._parts, self._place = parts, place

    def _note(self, error: BaseException) -> None:
        # tearDown often fails because setUp or the test did.
        self.found = self.found or error

    def addError(self, _: Any, found: Any) -> None:
        """Note an exception."""
        self._note(_raised(found))

    def addFailure(self, test: Any, found: Any) -> None:
        """Note a failed assertion."""
        self.addError(test, found)

    def addSubTest(self, _: Any, subtest: Any, found: Any) -> None:
        """Note the outcome of a part."""
        error = None if found is None else _raised(found)
        if REPORTS_PARTS:
            message = None if subtest._message is _subtest_msg_sentinel else str(subtest._message)
            described = None if error is None else self._place.describe(error)
            self._parts.append(Part(message, {name: saferepr(one) for name, one in subtest.params.items()}, described))
            if not self._place.leave_part(failed=error is not None) and error is not None:
                raise error  # others are still in this part, so this rank must not begin the next
        elif error is not None:
            notes = [*getattr(error, "__notes__", []), f"in the subtest {subtest._subDescription()}"]
            error.__dict__["__notes__"] = notes
            self._note(error)

    def addSkip(self, _: Any, reason: str) -> None:
        """Note a skip."""
        self._note(unittest.SkipTest(reason))

    def addExpectedFailure(self, *_: Any) -> None:
        """Note that it has failed as expected."""
        self._note(pytest.xfail.Exception(""))

    def addUnexpectedSuccess(self, _: Any) -> None:
        """Note that it has not failed, against expectation."""
        self._note(pytest.fail.Exception("Unexpected success", pytrace=False))


def _raised(found: tuple[type[BaseException], BaseException, TracebackType]) -> BaseException:
    return found[1].with_traceback(found[2])


def begin_class(owner: object, number: int) -> None:
    """Set up the class of a test if it is a TestCase and not set up yet. Collective."""
    if not (isinstance(owner, type) and issubclass(owner, unittest.TestCase)) or owner in _begun:
        return
    end_class()
    with group_names.for_class(number):
        torch_cases.on_ranks(owner).setUpClass()
    _begun.append(owner)


def end_class() -> None:
    """Tear down the class that is set up, and warn if that fails. Collective."""
    while _begun:
        owner = torch_cases.on_ranks(_begun.pop())
        for tear_down in (owner.tearDownClass, owner.doClassCleanups):
            try:
                tear_down()
            except Exception as error:
                told = f"{tear_down.__name__} of {owner.__qualname__} raised {type(error).__name__}: {error}"
                warnings.warn(pytest.PytestWarning(told), stacklevel=1)


def new_case(owner: type[unittest.TestCase], name: str) -> unittest.TestCase:
    """Return an instance for one method."""
    return torch_cases.on_ranks(owner)(name)


def run_case(case: unittest.TestCase, parts: list[Part], place: Place) -> None:
    """Run one method, with setUp, tearDown and cleanups; raise the first problem."""
    result = FirstProblem(parts, place)
    case.run(result)
    if result.found is not None:
        raise result.found
