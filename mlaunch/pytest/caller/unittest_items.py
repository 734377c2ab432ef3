"""Methods of ``unittest.TestCase`` with the mark, in pytest's process: who runs them, and what goes to their ranks."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from mlaunch.pytest.caller.mark import NAME
from mlaunch.pytest.rank.torch_cases import FILE, FOR_A_METHOD, bases_of

_SET_UP_CLASS = "_unittest_setUpClass_fixture"  # what pytest calls it
_THREADED = {"MultiThreadedTestCase"}


def take_in(item: pytest.Item, run: Callable[[pytest.Function], object]) -> None:
    """Lets ``run`` run a method of a TestCase: pytest calls none of its hooks for these."""
    if is_case(item):
        item.runtest = functools.partial(run, item)  # type: ignore[assignment, arg-type, method-assign]


def is_case(item: pytest.Item) -> bool:
    """Tells whether a test is such a method."""
    owner = getattr(item, "cls", None)
    return owner is not None and issubclass(owner, unittest.TestCase)


def state_of(item: pytest.Function) -> dict[str, Any] | None:
    """Returns what fixtures have given the test's instance; None: it has none."""
    if item.cls is None:
        return None
    given = dict(vars(item.instance))
    if not is_case(item):
        return given
    # What each instance has by itself is unittest's own, and the rank's instance has it as well.
    return {name: given[name] for name in given.keys() - vars(item.cls(item.name)).keys()} | _file_for(item)


def is_set_up_on_ranks(request: pytest.FixtureRequest, name: str) -> bool:
    """Tells whether a fixture stands for ``setUpClass`` of a class with the mark, and not for one that is skipped."""
    if not name.startswith(_SET_UP_CLASS) or getattr(request.cls, "__unittest_skip__", False):
        return False
    return any(mark.name == NAME for mark in request.node.iter_markers())


def _file_for(item: pytest.Function) -> dict[str, str]:
    """Returns the attribute that a test of such a class has on its ranks; nothing for other classes.

    Raises:
        pytest.fail.Exception: The class starts threads in place of processes.
    """
    bases = bases_of(item.cls)
    if bases & _THREADED:
        told = "a MultiThreadedTestCase has threads in place of ranks; leave out the mark ranks"
        raise pytest.fail.Exception(f"{item.name}: {told}", pytrace=False)
    if not bases & FOR_A_METHOD:
        return {}
    return {FILE: str(item._request.getfixturevalue("tmp_path") / "store")}
