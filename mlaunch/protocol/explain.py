"""Explanations of what in a value cannot be pickled and what to send instead; exceptions that survive pickling."""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import pickle
import re
import socket
import types
from collections.abc import Iterator
from typing import Any

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
    """Compare pickled forms: many objects have no useful equality, and tensors compare item by item.

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
