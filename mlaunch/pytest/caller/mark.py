"""The mark ``ranks``: what a test wants of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

NAME = "ranks"
SIZE = "_mlaunch_ranks"  # the fixture whose parameter is the size, if the mark has several
_OPTIONS = {"n", "backend", "device_type", "deadline", "fresh", "numa", "numa_memory"}
_LEVELS = (False, "group", True)


@dataclass(frozen=True)
class Shape:
    """The properties of a set of ranks, which tests of one shape share."""

    size: int
    device_type: str
    backend: str | None
    numa: str | None = None
    numa_memory: str | None = None


@dataclass(frozen=True)
class Wanted:
    """The wishes of one test. ``deadline``: in seconds; None: as for all tests. ``fresh``: False, "group" or True."""

    shape: Shape
    deadline: float | None
    fresh: bool | str


ON_RANKS = "_mlaunch_on_ranks"  # an attribute of the function of a fixture whose values are on ranks
POOL = pytest.StashKey[Any]()  # the session's RankPool
PROPERTIES = "mlaunch."  # the prefix of properties in reports
CI_COMMAND = "mlaunch_ci_command"  # an attribute of a report: what a CI service shows; xdist passes it on
WANTED = pytest.StashKey[Wanted]()
_READ = pytest.StashKey[list[pytest.Mark]]()  # the marks that WANTED was read from
_OURS = pytest.StashKey[pytest.Mark]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test of each size, if the mark has several."""
    mark = metafunc.definition.get_closest_marker(NAME)
    sizes = () if mark is None else _sizes(mark, metafunc.definition.nodeid)
    if len(sizes) > 1 and SIZE not in metafunc.fixturenames:
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, sizes, indirect=True, ids=[f"ranks={size}" for size in sizes])


def read_mark(item: pytest.Item) -> bool:
    """Note what a test wants of its ranks. True if that is new: hooks may add or change marks later.

    Add the mark once more, with its size by name, for ``-m "ranks(n=4)"``.
    """
    if item.get_closest_marker(NAME) is None:
        return False
    marks = _marks_of(item)
    if marks == item.stash.get(_READ, None):
        return False
    item.stash[_READ] = marks
    if not isinstance(item, pytest.Function):
        item.warn(pytest.PytestWarning(f"{item.nodeid} is not a test function; the mark ranks has no effect on it"))
        return False
    options, size = _options(item, marks), _size_of(item, marks[0])
    near = options.get("numa"), options.get("numa_memory")
    shape = Shape(size, options.get("device_type") or "cpu", options.get("backend"), *near)
    item.stash[WANTED] = Wanted(shape, options.get("deadline"), options.get("fresh", False))
    # pytest selects only by keyword arguments of marks.
    before, item.stash[_OURS] = item.stash.get(_OURS, None), pytest.mark.ranks(n=size).mark
    item.own_markers[:] = [*(mark for mark in item.own_markers if mark is not before), item.stash[_OURS]]
    return True


def _marks_of(item: pytest.Item) -> list[pytest.Mark]:
    """Return the marks of a test, the nearest first; ``pytest.param`` is nearer than the function."""
    callspec = getattr(item, "callspec", None)
    own = [] if callspec is None else [mark for mark in callspec.marks if getattr(mark, "mark", mark).name == NAME]
    own = [getattr(mark, "mark", mark) for mark in own]
    ours = item.stash.get(_OURS, None)
    return own + [mark for mark in item.iter_markers(NAME) if mark is not ours and mark not in own]


def _size_of(item: pytest.Function, mark: pytest.Mark) -> int:
    sizes, callspec = _sizes(mark, item.nodeid), getattr(item, "callspec", None)
    if len(sizes) == 1:
        return sizes[0]
    if callspec is None or SIZE not in callspec.params:
        late = f"the mark ranks{_given(mark)} comes from pytest.param or a hook, too late to make a test of each size"
        told = f"{late}: give one size there, or write the mark on the function, class or module"
        raise pytest.UsageError(f"{item.nodeid}: {told}")
    return int(callspec.params[SIZE])


def _sizes(mark: pytest.Mark, test: str) -> tuple[int, ...]:
    sizes = mark.args or ((mark.kwargs["n"],) if "n" in mark.kwargs else ())
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(f"{test}: the mark ranks{_given(mark)} lacks a number of ranks: write ranks(4)")
    return tuple(sizes)


def _options(item: pytest.Item, marks: Sequence[pytest.Mark]) -> Mapping[str, Any]:
    """Return the options of the mark; if a class or module has it as well, those of the nearest."""
    found: dict[str, Any] = {}
    for mark in reversed(marks):
        found.update(mark.kwargs)
    unknown = sorted(found.keys() - _OPTIONS)
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the mark ranks has no option {unknown[0]!r}; it has {', '.join(sorted(_OPTIONS - {'n'}))}"
        )
    if found.get("fresh", False) not in _LEVELS:
        raise pytest.UsageError(f"{item.nodeid}: fresh={found['fresh']!r}: allowed: False, 'group', True")
    deadline = found.get("deadline")
    if deadline is not None and not (isinstance(deadline, int | float) and deadline > 0):
        raise pytest.UsageError(f"{item.nodeid}: deadline={deadline!r}: allowed: a number of seconds above 0, or None")
    return found


def _given(mark: pytest.Mark) -> str:
    return f"({', '.join(map(repr, mark.args))})"
