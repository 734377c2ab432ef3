"""Which tests start a fresh interpreter, as their code shows it: so nobody marks them by hand.

A test does if its own code, or what it uses of the suite (fixtures, helpers, classes), names ``sys.executable``,
mlaunch's public ``Server`` or ``start_method="spawn"``, or if one of its parameters does. ``Watch`` holds tests to it
while they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

_NAMES = {"executable", "Server"}
_SPAWN = "spawn"


def is_fresh(item: pytest.Item) -> bool:
    """Says whether a test starts an interpreter."""
    if not isinstance(item, pytest.Function):
        return False
    callspec = getattr(item, "callspec", None)
    if callspec is not None and any(_starts_one(value) for value in callspec.params.values()):
        return True
    seen: set[object] = set()
    return any(_shows(function, seen) for function in _functions_of(item))


def _functions_of(item: pytest.Function) -> Iterator[object]:
    """The test and its fixtures."""
    yield item.function
    info = item._fixtureinfo
    for name in info.names_closure:
        for definition in info.name2fixturedefs.get(name, ()):
            if _ours(definition.func):
                yield definition.func


def _ours(thing: object) -> bool:
    """Whether it belongs to the suite, not to mlaunch or a library."""
    return str(getattr(thing, "__module__", "")).split(".")[0] in {"tests", "conftest"}


def _starts_one(value: object) -> bool:
    return value == _SPAWN or (isinstance(value, (str, list, tuple, dict)) and sys.executable in repr(value))


def _shows(function: object, seen: set[object]) -> bool:
    """Whether a function or class, or one that it uses, starts an interpreter."""
    if not isinstance(function, (FunctionType, type)) or function in seen:
        return False
    seen.add(function)
    if isinstance(function, type):
        return any(_shows(part, seen) for part in _methods(function))
    names, constants = _words(function.__code__)
    if names & _NAMES or _SPAWN in constants:
        return True
    return any(_used(function.__globals__[name], seen) for name in names & function.__globals__.keys())


def _used(value: Any, seen: set[object]) -> bool:
    if isinstance(value, (FunctionType, type)):
        return _ours(value) and _shows(value, seen)
    return _starts_one(value) or (isinstance(value, (list, tuple)) and _SPAWN in value)


def _methods(cls: type) -> Iterator[object]:
    for base in cls.__mro__:
        if _ours(base):
            for part in vars(base).values():
                function = getattr(part, "__func__", getattr(part, "fget", part))
                yield getattr(function, "__wrapped__", function)


def _words(code: CodeType) -> tuple[set[str], set[object]]:
    """The names and the constants of a function, with those of the functions inside it."""
    names, constants = set(code.co_names), set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _words(constant)
            names |= inner[0]
            constants |= inner[1]
        else:
            constants |= set(constant) if isinstance(constant, (tuple, frozenset)) else {constant}
    return names, constants


class Watch:
    """Counts the interpreters that the suite's own code starts in this process."""

    def __init__(self) -> None:
        self.started: list[str] = []
        sys.addaudithook(self._hear)  # it stays for good, as hooks do

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and sys.executable in map(str, args[1]) and _by_the_suite(sys._getframe(1)):
            self.started.append(" ".join(map(str, args[1][:4]))[:80])


def _by_the_suite(frame: FrameType | None) -> bool:
    """Whether it is a test or helper that called subprocess, and not mlaunch."""
    while frame is not None and frame.f_globals.get("__name__") == "subprocess":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in {"tests", "conftest"}
