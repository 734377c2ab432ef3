"""Which tests start a fresh interpreter, as their code shows it: so nobody marks them by hand.

A test does if its own code, or what it uses of the suite (fixtures, helpers, classes), names ``sys.executable`` or
``start_method="spawn"``, or if one of its parameters does. So does one that ends the warm fork server, or changes what
it was imported under: mlaunch starts another. ``Watch`` holds tests to it while they run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

_NAMES = {
    "executable",
    "in_a_process",
    "fork_server_of_a_rank",
    "stopping_the_next_interpreter",
    "start_adapter",
}
_ASKS_FOR_IT = {"server_pid", "fork_server", "warm_server"}  # beside "kill" in one function
_SPAWN = "spawn"
_VICTIM = "fork server"  # whom a test kills or stops
_SHOWN: dict[tuple[object, tuple[str, ...]], frozenset[object]] = {}
_SETTINGS = {"TORCH_DISTRIBUTED_DEBUG", "USE_LIBUV"}  # read when torch is imported, so another server is started


def is_fresh(item: pytest.Item) -> bool:
    """Says whether a test starts an interpreter."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    if any(map(_starts_one, params.values())):
        return True
    if params.get("start_method") == "fork":  # what serves it is a fork, and ends with it
        return bool(_shown_by(item) - {_VICTIM})
    return any(_ends_the_server(value) for value in params.values()) or bool(_shown_by(item))


def _shown_by(item: pytest.Item) -> frozenset[object]:
    """What a test's code shows, with all that it uses; the same for all its parameters."""
    if not isinstance(item, pytest.Function):
        return frozenset()
    key = item.function, tuple(item.fixturenames)
    if key not in _SHOWN:
        _SHOWN[key] = frozenset().union(*map(_shows, used_by(item)))
    return _SHOWN[key]


def used_by(item: pytest.Item) -> Iterator[FunctionType]:
    """The functions of the suite that a test uses: itself, its fixtures, what these name, and so on."""
    waiting: list[object] = list(_functions_of(item)) if isinstance(item, pytest.Function) else []
    seen = set()
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, type) and _ours(thing):
            waiting += _methods(thing)
        elif isinstance(thing, FunctionType) and _ours(thing) and thing not in seen:
            seen.add(thing)
            yield thing
            waiting += (value for _, value in globals_of(thing))


def globals_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The global names that a function uses, with their values; None for what it imports itself."""
    for name in words(function.__code__)[0]:
        yield name, function.__globals__.get(name)


@functools.lru_cache(None)
def words(code: CodeType) -> tuple[frozenset[str], frozenset[object]]:
    """The names and the constants of a function, with those of the functions inside it."""
    names, constants = set(code.co_names), set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = words(constant)
            names |= inner[0]
            constants |= inner[1]
        else:
            constants |= set(constant) if isinstance(constant, (tuple, frozenset)) else {constant}
    return frozenset(names), frozenset(constants)


def _functions_of(item: pytest.Function) -> Iterator[object]:
    """The test and its fixtures."""
    yield item.function
    info = item._fixtureinfo
    for name in info.names_closure:
        for definition in info.name2fixturedefs.get(name, ()):
            yield definition.func


def _methods(cls: type) -> Iterator[object]:
    for base in cls.__mro__:
        if _ours(base):
            for part in vars(base).values():
                function = getattr(part, "__func__", getattr(part, "fget", part))
                yield getattr(function, "__wrapped__", function)


def _ours(thing: object) -> bool:
    """Whether it belongs to the suite, not to mlaunch or a library."""
    module = str(getattr(thing, "__module__", ""))
    return module.split(".")[0] in {"tests", "conftest"} and module != "tests.imported"  # which all tests use


@functools.lru_cache(None)
def _shows(function: FunctionType) -> frozenset[object]:
    """What of a function's code says so."""
    names, constants = words(function.__code__)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values = [*defaults, *(value for _, value in globals_of(function))]
    told = names & _NAMES | (names & _ASKS_FOR_IT if "kill" in names else set())
    return told | constants & {_SPAWN, _VICTIM, *_SETTINGS} | {_SPAWN for value in values if _starts_one(value)}


def _ends_the_server(value: object) -> bool:
    return isinstance(value, str) and _VICTIM in value


def _starts_one(value: object) -> bool:
    """Whether a parameter or a constant of a module is a command of this interpreter, or a way to start one."""
    if isinstance(value, (list, tuple)) and _SPAWN in value:
        return True
    return value == _SPAWN or (isinstance(value, (str, list, tuple, dict)) and sys.executable in repr(value))


class Watch:
    """Counts the interpreters that are started in this process: by the suite's own code, and warm fork servers."""

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
