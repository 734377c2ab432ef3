"""Methods of ``unittest.TestCase`` on ranks, also of torch's own classes: all of a test but its report runs there.

Each rank makes its own instance, since pytest's cannot be pickled. ``setUpClass`` runs on the ranks before the first
method of its class, ``tearDownClass`` after the last, before one of another class.

Torch's classes need nothing but the mark. A MultiProcessTestCase starts processes for each of its methods, which make a
process group by themselves; a MultiProcContinuousTest starts them for all, and makes the group. On ranks these
processes are the ranks: a method has its rank, the number of ranks (that of the mark) and a file for a store, and is
called once on each of them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any
from unittest.case import _subtest_msg_sentinel  # type: ignore[attr-defined]

import pytest
from _pytest._io.saferepr import saferepr
from _pytest.unittest import TestCaseFunction

from mlaunch.pytest.rank import isolation
from mlaunch.pytest.rank.explanation import Place
from mlaunch.pytest.wire import Part

# True if pytest reports subtests of unittest. With an older Python it asks the instance for them.
REPORTS_PARTS = hasattr(TestCaseFunction, "addSubTest") and sys.version_info >= (3, 11)
_begun: list[type[unittest.TestCase]] = []  # of this rank: the class that is set up, or none


class FirstProblem(unittest.TestResult):
    """The result that pytest reports: of several problems the first. ``parts``: where subtests are noted."""

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
    with isolation.names_for_class(number):
        on_ranks(owner).setUpClass()
    _begun.append(owner)


def end_class() -> None:
    """Tear down the class that is set up, and warn if that fails. Collective."""
    while _begun:
        owner = on_ranks(_begun.pop())
        for tear_down in (owner.tearDownClass, owner.doClassCleanups):
            try:
                tear_down()
            except Exception as error:
                told = f"{tear_down.__name__} of {owner.__qualname__} raised {type(error).__name__}: {error}"
                warnings.warn(pytest.PytestWarning(told), stacklevel=1)


def new_case(owner: type[unittest.TestCase], name: str) -> unittest.TestCase:
    """Return an instance for one method."""
    return on_ranks(owner)(name)


def run_case(case: unittest.TestCase, parts: list[Part], place: Place) -> None:
    """Run one method, with setUp, tearDown and cleanups; raise the first problem."""
    result = FirstProblem(parts, place)
    case.run(result)
    if result.found is not None:
        raise result.found


FILE = "_mlaunch_file"  # the attribute with the name of the file that the ranks of a test share
_MODULE = "torch.testing._internal.common_distributed"
# These begin without a process group, as they make one: in the ranks' own, init_process_group would do nothing, and the
# test would not have its store, timeout and backend.
FOR_A_METHOD = {"MultiProcessTestCase"}
_adapted: dict[type[unittest.TestCase], type[unittest.TestCase]] = {}  # of this rank
_FOR_A_CLASS = {"MultiProcContinuousTest", "MultiProcContinousTest"}  # the latter before torch 2.7


def bases_of(owner: type[Any] | None) -> set[str]:
    """Return the names of torch's own classes of tests that a class is derived from."""
    return {base.__name__ for base in getattr(owner, "__mro__", ()) if base.__module__ == _MODULE}


def on_ranks(owner: type[unittest.TestCase]) -> type[unittest.TestCase]:
    """Return a subclass whose methods run in this rank; the class itself if it starts no processes."""
    if owner not in _adapted:
        _adapted[owner] = _adapt(owner)
    return _adapted[owner]


def _adapt(owner: type[unittest.TestCase]) -> type[unittest.TestCase]:
    bases, changes = bases_of(owner), dict[str, Any]()
    if bases & FOR_A_METHOD:
        changes = {"join_or_run": _alone, "run_test": _run_test}
        changes |= dict.fromkeys(("_spawn_processes", "_fork_processes"), _nothing)
    elif bases & _FOR_A_CLASS:
        changes = {"_worker_run_main_wait": _in_the_group, **_OF_A_CLASS}
    else:
        return owner
    import torch.distributed as dist

    changes["world_size"] = dist.get_world_size()
    names = {name: getattr(owner, name) for name in ("__module__", "__qualname__")}
    return type(owner.__name__, (owner,), {**changes, **names})


def _nothing(*_: Any) -> None:
    """Start no processes, and make no group."""


_OF_A_CLASS = {
    **dict.fromkeys(("_ensure_processes_spawned", "_spawn_processes", "_init_pg"), staticmethod(_nothing)),
    **dict.fromkeys(("processes", "task_queues", "completion_queues"), ()),
}


def _in_the_group(case: Any, function: Callable[[], object]) -> Any:
    """Return the method that runs the test's function in the ranks' own process group."""

    @functools.wraps(function)
    def run(case: Any) -> None:
        import torch.distributed as dist

        case.rank, case.pg = (
            dist.get_rank(),
            dist.group.WORLD,
        )  # only now: before, this is the process that starts others
        with _skips():
            function()

    return types.MethodType(run, case)


def _alone(case: Any, function: Callable[[], object]) -> Any:
    """Return the method that runs the test's function, which makes a process group by itself."""

    @functools.wraps(function)
    def run(case: Any) -> None:
        if getattr(case, "rank", -1) >= 0:  # this instance is in a process that the class has started
            function()
            return
        import torch.distributed as dist

        # The file is this rank's own: the shared one could be removed while others use it.
        before = (case.rank, case.file_name)
        rank, file = dist.get_rank(), getattr(case, FILE)
        isolation.leave_world()
        try:
            with _skips():
                _as_process(case, rank, file, function)
        finally:
            case.rank, case.file_name = before
            isolation.leave_world()

    return types.MethodType(run, case)


def _as_process(case: Any, rank: int, file: str, function: Callable[[], object]) -> None:
    """Do what the process would do: some classes (FSDPTest) make the group before they call the function."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    kind = type(case)
    if kind._run.__func__ is not MultiProcessTestCase._run.__func__:  # type: ignore[attr-defined]
        kind._run(rank, case._testMethodName, file, None)
        return
    case.rank, case.file_name = rank, file
    function()


def _run_test(case: Any, name: str, *_: Any) -> None:
    getattr(case, name)()


@contextlib.contextmanager
def _skips() -> Any:
    """Turn the exit codes by which torch's decorators skip a test into skips."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        yield
    except SystemExit as leaving:
        found = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == leaving.code]
        if not found:
            raise
        raise unittest.SkipTest(found[0]) from None
