"""The part of a call that a rank could not unpickle, found by unpickling it once more with pickle's code in Python.

A stand-in replaces what cannot be made, so that everything around it can be made; its place is then looked up.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from mlaunch.protocol import explain

_FIELDS = {"function", "args", "kwargs"}  # of a Call
_BUILDS = {"load_build": "inst", "load_newobj": "cls", "load_newobj_ex": "cls", "load_reduce": "func"}
_MOST = 100_000  # objects looked at


class _StandIn:
    """A replacement for what could not be made. ``of``: what it was to be made of."""

    def __init__(self, of: object = None) -> None:
        self.of = of


# Python's own, which is slow and can be looked into; it runs only once C's has failed.
class _Unpickler(pickle._Unpickler):
    """An unpickler that keeps the first error, and continues."""

    stack: list[Any]

    def __init__(self, file: io.BytesIO, *, buffers: Iterable[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.found: tuple[_StandIn, str, Exception] | None = None
        self._made_of: dict[int, list[Any]] = {}  # by the number of the object, which is the first; then its parts

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except Exception as error:  # whatever a module may raise
            return self._take(error, None)

    def _take(self, error: Exception, of: object) -> _StandIn:
        stand_in = _StandIn(of)
        self.found = self.found or (stand_in, _made(error), error)
        return stand_in

    def _on(self, load: Callable[[Any], None], operands: int) -> None:
        """Do what an operation of the pickle does to the top of the stack; a stand-in is left there if it fails."""
        depth, of = len(self.stack) - operands, self.stack[-operands:]
        try:
            load(self)
        except Exception as error:  # whatever a __setstate__ may raise
            del self.stack[depth:]
            self.stack.append(self._take(error, of))
        else:
            self._made_of.setdefault(id(self.stack[-1]), self.stack[-1:]).extend(of)

    def path(self, whole: object, stand_in: _StandIn) -> list[str]:
        """Return the names that lead to the stand-in, from outside: of globals, keys, attributes; the shortest way."""
        ways: list[tuple[object, list[str]]] = [(whole, [])]
        seen = {id(whole)}
        for found, names in ways:
            if found is stand_in:
                return names
            for name, part in self._parts(found):
                if id(part) not in seen and len(ways) < _MOST:
                    seen.add(id(part))
                    ways.append((part, [*names, name] if name else names))
        return []

    def _parts(self, found: Any) -> Iterator[tuple[str, object]]:
        """Yield what an object holds, with its name there, "" if it has none."""
        if isinstance(found, dict):
            yield from ((key if isinstance(key, str) else "", part) for key, part in list(found.items()))
        elif isinstance(found, list | tuple | set | frozenset):
            yield from (("", part) for part in found)
        elif isinstance(found, _StandIn):
            yield "", found.of
        elif made_of := self._made_of.get(id(found)):
            yield from _attributes(found)
            yield "", made_of[1:]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: lambda self: self._on(pickle._Unpickler.load_reduce, 2),  # type: ignore[attr-defined]
        pickle.NEWOBJ[0]: lambda self: self._on(pickle._Unpickler.load_newobj, 2),  # type: ignore[attr-defined]
        pickle.NEWOBJ_EX[0]: lambda self: self._on(pickle._Unpickler.load_newobj_ex, 3),  # type: ignore[attr-defined]
        pickle.BUILD[0]: lambda self: self._on(pickle._Unpickler.load_build, 2),  # type: ignore[attr-defined]
    }


def culprit(stream: bytes | memoryview, buffers: Iterable[Any]) -> str:
    """Return what could not be made, its place, and what to do; "" if it can be made the second time."""
    unpickler, whole = _Unpickler(io.BytesIO(stream), buffers=buffers), None
    try:
        whole = unpickler.load()
    except Exception as error:  # beside a stand-in more may fail
        unpickler.found = unpickler.found or (_StandIn(), _made(error), error)
    if unpickler.found is None:
        return ""
    stand_in, made, first = unpickler.found
    return _in_words(unpickler.path(whole, stand_in), made, first)


def _made(error: Exception) -> str:
    """Return the name of the class, function or module that pickle was busy with."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") != "pickle":
            continue
        name, found = frame.f_code.co_name, frame.f_locals
        if name == "find_class":
            return f"{found['module']}.{found['name']}"
        if name in _BUILDS and _BUILDS[name] in found:
            return _name_of(found[_BUILDS[name]], found.get("args", ()))
    return ""


def _name_of(found: Any, args: Sequence[Any]) -> str:
    if not isinstance(found, type) and not callable(found):
        return explain.type_name(found)
    kind = next((arg for arg in args if isinstance(arg, type)), found)
    kind = type(found) if not hasattr(kind, "__qualname__") else kind
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.").removeprefix("builtins.")


def _attributes(found: Any) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object; of a function, what it uses."""
    if code := getattr(found, "__code__", None):
        for name, cell in zip(code.co_freevars, getattr(found, "__closure__", None) or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # the cell is empty yet
                continue
        names = getattr(found, "__globals__", {})
        yield from ((name, names[name]) for name in code.co_names if name in names)
    attributes = getattr(found, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.items()


def _in_words(names: list[str], made: str, error: Exception) -> str:
    path = ".".join(name for name in names if name not in _FIELDS and not name.startswith("__"))
    if isinstance(error, ImportError):
        return (
            f"the rank could not import {made}, which the call uses: put its directory on sys.path before the call, or "
            f"send its module along (cloudpickle.register_pickle_by_value)"
        )
    what = (f"a {made}" if made else "an object") + (f" at {path!r}" if path else "")
    return (
        f"the rank could not unpickle {what}, which the call sends: create such an object inside the function, or give "
        f"its class a __reduce__ that another process can follow"
    )
