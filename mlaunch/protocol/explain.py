"""Explanations of what in a value cannot be pickled, and what to send instead; exceptions that survive pickling.

And of what in a call a rank could not unpickle: it is found by unpickling the call once more with pickle's code in
Python. A stand-in replaces what cannot be made, so that everything around it can be made; its place is then looked up.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import pickle
import re
import socket
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from mlaunch.base.text import with_article
from mlaunch.protocol import payload
from mlaunch.protocol.pickling import pickle_by_name

_RUNNING = (types.GeneratorType, types.AsyncGeneratorType)
_HERE_ALONE = (*_RUNNING, types.CoroutineType, io.IOBase, socket.socket)
_REPEATED = r"cannot pickle (an open file|'?[\w.]+'? objects?)"
_DEPTH = 12  # levels; no message stays readable beyond
_WIDTH = 10_000  # children checked per level
_PICKLERS = frozenset({"mlaunch", "cloudpickle", "pickle", "copyreg", "torch", "numpy"})  # whose frames tell nothing


def unpicklable(value: object, name: str) -> str:
    """Return a sentence about what in ``value`` cannot be pickled: "value['model'].lock is a _thread.lock".

    For what a function refers to: "train() uses the global 'loss', which uses the global 'lock', a _thread.lock".
    """
    return culprit(value, name)[0]


def culprit(value: object, name: str) -> tuple[str, object]:
    """Return a sentence about the part of a value that cannot be pickled, and that part."""
    seen = {id(value)}
    users: list[str] = []  # functions on the way
    for _ in range(_DEPTH):
        if _refuses(value):  # its parts would explain nothing
            break
        parts: list[tuple[str, object, list[str]]] = [(path, child, []) for path, child in _children(value, name)]
        parts += [(path, child, [name]) for path, child in _used(value)]
        found = next((part for part in parts if id(part[1]) not in seen and not picklable(part[1])), None)
        if found is None:
            break
        name, value, user = found
        users += user
        # Values may contain themselves.
        seen.add(id(value))
    if not users:
        return f"{name} is {with_article(type_name(value))}", value
    first, *others = *users, name
    return f"{first} uses {', which uses '.join(others)}, {with_article(type_name(value))}", value


def type_name(value: object) -> str:
    """Return the name of the value's type as tracebacks show it."""
    kind = type(value)
    if kind.__module__.startswith("mlaunch."):  # nobody needs to know where it is defined there
        return f"mlaunch.{kind.__qualname__}"
    module = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
    return module + kind.__qualname__


def _refuses(value: object) -> bool:
    """True if the object itself cannot be pickled, according to its class."""
    if isinstance(value, type | types.FunctionType | types.ModuleType):  # which pickle does not ask
        return False
    try:
        value.__reduce_ex__(5)
    except Exception:  # whatever a __reduce__ may raise
        return True
    return False


def picklable(value: object) -> bool:
    try:
        payload.check(value)
    except Exception:  # whatever a __reduce__ may raise
        return False
    return True


def below_the_pickler(error: Exception) -> Exception | None:
    """Return the exception with only the frames of a user's ``__reduce__`` or ``__getstate__``; None: it has none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _PICKLERS:
        trace = trace.tb_next
    return None if trace is None else error.with_traceback(trace)


def _children(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        pairs = [(f"{name}[{key!r}]", child) for key, child in value.items()]
        pairs += [(f"a key of {name}", key) for key in value]
    elif isinstance(value, list | tuple):
        pairs = [(f"{name}[{index}]", child) for index, child in enumerate(value)]
    elif isinstance(value, set | frozenset):
        pairs = [(f"an element of {name}", child) for child in value]
    else:
        pairs = [(f"{name}.{key}", child) for key, child in getattr(value, "__dict__", {}).items()]
    yield from pairs[:_WIDTH]


def _used(value: object) -> list[tuple[str, object]]:
    """Return what a function uses, as (name, value)."""
    code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None)
    pairs: list[tuple[str, object]] = []
    for variable, cell in zip(getattr(code, "co_freevars", ()), cells or (), strict=False):
        try:
            pairs.append((f"the variable {variable!r}", cell.cell_contents))
        except ValueError:  # the cell is still empty
            continue
    module = getattr(value, "__globals__", {})
    used = [key for key in getattr(code, "co_names", ()) if key in module]
    return pairs + [(f"the global {key!r}", module[key]) for key in used]


def pickle_exception(error: BaseException) -> bytes | None:
    """Return the exception as bytes that unpickle to its type for certain, or None.

    Many exceptions do not survive pickle's own way, which calls the class with ``args``: their ``__init__`` takes other
    arguments, or changes the text. These, and exceptions with attributes that cannot be pickled, are rebuilt without
    ``__init__``.
    """
    _, pickled = _best(error)
    return pickled


def _best(error: BaseException) -> tuple[_Likeness, bytes | None]:
    """Return the pickled form that keeps most of the exception."""
    best: tuple[_Likeness, bytes | None] = _Likeness.NONE, None
    # The class's own way first: it knows best what its exceptions need.
    for candidate in (error, _Rebuilt(error)):
        # Tried here, in the rank: an exception that does not unpickle in the caller would hide the failure that it
        # reports.
        likeness, pickled = _round_trip(candidate, error)
        if likeness > best[0]:
            best = likeness, pickled
        if likeness is _Likeness.WHOLE:
            break
    return best


class _Likeness(enum.IntEnum):
    """How much of an exception a round trip keeps."""

    NONE = 0
    TYPE = 1  # and it can be shown
    TEXT = 2
    WHOLE = 3


def _round_trip(candidate: object, error: BaseException) -> tuple[_Likeness, bytes]:
    try:
        pickled = _dumps(candidate)
        return _likeness(pickle.loads(pickled), error), pickled
    except BaseException:  # whatever a __reduce__, an __init__ or a __str__ may raise, be it to exit
        return _Likeness.NONE, b""


def _likeness(back: object, error: BaseException) -> _Likeness:
    if type(back) is not type(error):
        return _Likeness.NONE
    text = _text(back)
    if text != _text(error):
        return _Likeness.NONE if text is None else _Likeness.TYPE
    return _Likeness.WHOLE if _same(_content(back), _content(error)) else _Likeness.TEXT


def _text(error: object) -> str | None:
    try:
        return str(error)
    except Exception:  # the user's __str__
        return None


def _content(error: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and attributes, without those that raising the exception sets."""
    attributes = {**_members(error), **error.__dict__}
    return error.args, {key: value for key, value in attributes.items() if key != "__suppress_context__"}


def _same(one: tuple[tuple[Any, ...], dict[str, Any]], other: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """True if their pickled forms are the same: many objects have no useful equality, and tensors compare item by item.

    Equal values that pickle differently (a set in another order) count as different, which does no harm.
    """
    args, attributes = one
    if payload.PLAIN.issuperset(map(type, (*args, *attributes.values()))):
        return one == other
    try:
        return _dumps(one) == _dumps(other)
    except Exception:  # a part cannot be pickled, and did not arrive
        return False


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    pickle_by_name(file, value, in_band=True)
    return file.getvalue()


class _Rebuilt:
    """A stand-in that pickles as the exception it holds: type, args and those attributes that can be pickled."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        args = tuple(_portable(arg) for arg in error.args)
        attributes = {**_members(error), **error.__dict__}
        state = {key: value for key, value in attributes.items() if picklable(value)}
        return _rebuild, (type(error), args, state)


def _members(error: BaseException) -> dict[str, Any]:
    """Return what exceptions keep outside ``__dict__``: errno, filename, name, path, and the values of slots."""
    # The members of a group are in its args already.
    groups = ("BaseExceptionGroup", "ExceptionGroup")
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ != "builtins" or kind.__name__ not in groups]
    names = [key for kind in kinds for key, value in vars(kind).items() if inspect.ismemberdescriptor(value)]
    return {name: getattr(error, name) for name in names if getattr(error, name, None) is not None}


def _portable(arg: object) -> object:
    """Return an argument of an exception, or a substitute that can be pickled; so for each exception of a group."""
    if isinstance(arg, BaseException):
        return arg if _round_trip(arg, arg)[0] is _Likeness.WHOLE else _Rebuilt(arg)
    if isinstance(arg, list | tuple) and any(isinstance(member, BaseException) for member in arg):
        return [_portable(member) for member in arg]
    return arg if picklable(arg) else repr(arg)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    # The class's own __new__, __init__ and __setattr__ (a frozen dataclass's refuses) may need arguments that are
    # unknown here.
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(kind, *args)
    for name, value in {**state, "args": args}.items():
        with contextlib.suppress(AttributeError, TypeError):  # a read-only member
            BaseException.__setattr__(error, name, value)
    return error


def reason(error: Exception) -> str:
    """Return pickle's own reason in brackets; "" if it only repeats what cannot be pickled."""
    if re.fullmatch(_REPEATED, str(error)):
        return ""
    # A TypeError says itself that something cannot be pickled.
    return f" ({error})" if type(error) is TypeError and str(error) else f" ({type(error).__name__}: {error})"


def instead_to_pass(culprit: object) -> str:
    """Return the end of a message about what to pass to ranks instead; "" if unknown."""
    if isinstance(culprit, _RUNNING):
        return ": pass a list of its items, or create it in the function, which each rank runs"
    if isinstance(culprit, io.IOBase):
        return ": pass its path, and open it in the function, which each rank runs"
    if isinstance(culprit, types.CoroutineType):
        return ": pass what it returns"
    return ": create it in the function, which each rank runs" if _is_of_one_process(culprit) else ""


def instead_to_return(culprit: object) -> str:
    """Return the end of a message about what a rank should return instead; "" if unknown."""
    if isinstance(culprit, _RUNNING):
        return ": return a list of its items"
    if isinstance(culprit, io.IOBase):
        return ": return its path, or what it holds"
    return ": return what it returns" if isinstance(culprit, types.CoroutineType) else ""


def _is_of_one_process(culprit: object) -> bool:
    return isinstance(culprit, _HERE_ALONE) or type(culprit).__module__ in {"_thread", "threading", "_multiprocessing"}


# What a rank could not unpickle

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


def unreadable_part(stream: bytes | memoryview, buffers: Iterable[Any]) -> str:
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
        return type_name(found)
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
