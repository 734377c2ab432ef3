"""The mark: what a test wants of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

NAME = "ranks"
SIZE = "_mlaunch_ranks"  # the fixture whose parameter is the size, where there are several
_OPTIONS = {"n", "backend", "device_type", "deadline", "fresh"}
_LEVELS = (False, "group", True)


@dataclass(frozen=True)
class Shape:
    """What tests have in common that share ranks."""

    size: int
    device_type: str
    backend: str | None


@dataclass(frozen=True)
class Wanted:
    """What one test wants. ``deadline``: in seconds; None: that of all. ``fresh``: False, "group" or True."""

    shape: Shape
    deadline: float | None
    fresh: bool | str


WANTED = pytest.StashKey[Wanted]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Makes a test of each size, where the mark has several."""
    mark = metafunc.definition.get_closest_marker(NAME)
    sizes = () if mark is None else _sizes(mark, metafunc.definition.nodeid)
    if len(sizes) > 1 and SIZE not in metafunc.fixturenames:
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, sizes, indirect=True, ids=[f"ranks={size}" for size in sizes])


def take_in(item: pytest.Item) -> None:
    """Notes what a test wants, and adds the mark with its size by name: ``-m "ranks(n=4)"`` selects by that."""
    mark = item.get_closest_marker(NAME)
    if mark is None:
        return
    sizes, options = _sizes(mark, item.nodeid), _options(item)
    callspec = getattr(item, "callspec", None)
    size = sizes[0] if callspec is None else callspec.params.get(SIZE, sizes[0])
    shape = Shape(size, options.get("device_type") or "cpu", options.get("backend"))
    item.stash[WANTED] = Wanted(shape, options.get("deadline"), options.get("fresh", False))
    # pytest selects by keyword arguments of marks alone.
    item.add_marker(pytest.mark.ranks(n=size))


def _sizes(mark: pytest.Mark, test: str) -> tuple[int, ...]:
    sizes = mark.args or ((mark.kwargs["n"],) if "n" in mark.kwargs else ())
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(f"{test}: the mark ranks{_given(mark)} lacks a number of ranks: write ranks(4)")
    return tuple(sizes)


def _options(item: pytest.Item) -> Mapping[str, Any]:
    """Returns the options of the mark, where a class or module has it too the nearest."""
    found: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(NAME))):
        found.update(mark.kwargs)
    unknown = sorted(found.keys() - _OPTIONS)
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: the mark ranks has no option {unknown[0]!r}; it has {_names()}")
    if found.get("fresh", False) not in _LEVELS:
        raise pytest.UsageError(f"{item.nodeid}: fresh={found['fresh']!r}: allowed: False, 'group', True")
    deadline = found.get("deadline")
    if deadline is not None and not (isinstance(deadline, int | float) and deadline > 0):
        raise pytest.UsageError(f"{item.nodeid}: deadline={deadline!r}: allowed: a number of seconds above 0, or None")
    return found


def _names() -> str:
    return ", ".join(sorted(_OPTIONS - {"n"}))


def _given(mark: pytest.Mark) -> str:
    return f"({', '.join(map(repr, mark.args))})"
