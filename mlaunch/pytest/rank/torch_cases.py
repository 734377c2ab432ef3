"""Methods of torch's own classes of tests on ranks: a class gets the mark, and nothing else of it changes.

A MultiProcessTestCase starts processes for each of its methods, which make a process group by themselves; a
MultiProcContinuousTest starts them for all, and makes the group. On ranks these processes are the ranks: a method has
its rank, the number of ranks (that of the mark) and a file for a store, and is called once on each of them.
"""

from __future__ import annotations

import contextlib
import functools
import types
import unittest
from collections.abc import Callable
from typing import Any

from mlaunch.pytest.rank import group_names

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
        group_names.leave_world()
        try:
            with _skips():
                _as_process(case, rank, file, function)
        finally:
            case.rank, case.file_name = before
            group_names.leave_world()

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
