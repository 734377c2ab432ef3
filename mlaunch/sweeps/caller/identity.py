"""Forms of a function and its arguments by which a sweep's file finds them again, the same in any process.

What has no such form is refused: values of another function would silently be taken for this one's.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
import numbers
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlaunch.base.exceptions import misuse

_SHOWN = 300  # characters of what a function holds that a file shows
_NUMBERS = {"builtins", "decimal", "fractions", "numpy"}  # modules whose numbers say all of themselves
_ALLOWED = "numbers, strings, paths, None, members of enumerations, dtypes, and lists, tuples and dicts of them"


@dataclass(frozen=True)
class Identity:
    """The identity of a function. ``holds``: what it has beside its code, or ""; ``source``: a hash of the code."""

    function: str  # "train.evaluate", with its module
    holds: str
    source: str


def canonical(arguments: Mapping[str, Any]) -> str:
    """Return the arguments in a form that is the same for the same ones. TypeError for what has none."""
    forms = {name: _Forms(f"{name}=").of_value(value) for name, value in arguments.items()}
    return json.dumps(forms, sort_keys=True)


def identity_of(function: Callable[..., Any], name: str) -> Identity:
    """Return what identifies a function. TypeError if it holds something that has no form.

    Two partials of one function, two closures or two objects of a class with ``__call__`` differ only in what they
    hold.
    """
    forms = _Forms(f"{name}(), which holds ", code=True)
    form = forms.of(function)
    held = json.dumps(form, sort_keys=True)
    if form == {"code": forms.names[0]}:  # not a lambda, whose name says nothing
        held = ""
    elif len(held) > _SHOWN:
        held = f"{held[:_SHOWN]}... {_hash(held)}"
    return Identity(forms.names[0], held, _hash("\n".join(forms.sources)))


class _Forms:
    """Makes the forms of one thing and of what it holds.

    ``whose``: its name in errors; ``code``: functions, classes and objects have a form, too.
    """

    def __init__(self, whose: str, *, code: bool = False) -> None:
        self._whose, self._code = whose, code
        self._met: dict[int, tuple[int, object]] = {}  # by ID, with the object, so that no other gets the ID
        self.names: list[str] = []  # of functions and classes, as they are met
        self.sources: list[str] = []

    def of(self, value: Any) -> dict[str, Any]:
        """Return the form of code, or of an object."""
        if id(value) in self._met:
            return {"again": self._met[id(value)][0]}
        self._met[id(value)] = len(self._met), value
        if isinstance(value, functools.partial):
            held = {**{str(number): arg for number, arg in enumerate(value.args)}, **value.keywords}
            return {"partial of": self.of(value.func), **self._parts(held)}
        if isinstance(value, types.MethodType):
            return {"method": self.of(value.__func__), **self._parts({"self": value.__self__})}
        if _is_code(value):
            held = _held_by(value, whole=len(self._met) > 1) if isinstance(value, types.FunctionType) else {}
            return {"code": self._code_of(value), **self._parts(held)}
        return self.of(value.__wrapped__) if _is_only_a_wrapper(value) else self._of_object(value)

    def of_value(self, value: Any) -> Any:
        # By type() and not isinstance(): a subclass may hold more than its number or text.
        if value is None or type(value) in {bool, int, float, str}:
            return value
        if type(value) in {list, tuple, dict}:
            return self._of_parts(value)
        if isinstance(value, os.PathLike):
            return {"path": os.fspath(value)}
        if isinstance(value, enum.Enum) or says_all_of_itself(value):
            return {_name_of(type(value)): self.of_value(value.value) if isinstance(value, enum.Enum) else str(value)}
        if not self._code:
            raise self._no_form(value)
        return {"module": value.__name__} if isinstance(value, types.ModuleType) else self.of(value)

    def _of_parts(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Any:
        if isinstance(value, dict):
            pairs = [[self.of_value(key), self.of_value(part)] for key, part in value.items()]
            return {"dict": sorted(pairs, key=json.dumps)}
        parts = [self.of_value(part) for part in value]
        return parts if isinstance(value, list) else {"tuple": parts}

    def _of_object(self, value: Any) -> dict[str, Any]:
        """Return the form of an instance: what pickle would keep of it."""
        kind = type(value)
        if any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__")):
            raise self._no_form(value)
        try:
            _, args, *states = value.__reduce_ex__(2)
        except Exception:  # a lock, a file; what a __getstate__ may raise
            raise self._no_form(value) from None
        state, items, pairs = (*states, None, None, None)[:3]
        form = {"object of": self.of(kind)}
        if isinstance(state, dict) and not (args[1:] or items or pairs):
            return {**form, **self._parts({str(name): part for name, part in state.items()})}
        return {**form, "parts": self.of_value([list(args[1:]), state, list(items or ()), list(pairs or ())])}

    def _parts(self, held: Mapping[str, Any]) -> dict[str, Any]:
        whose, forms = self._whose, {}
        for name, value in held.items():
            self._whose = f"{whose.rpartition(' ')[0]} {name}"
            forms[name] = self.of_value(value)
        self._whose = whose
        return forms

    def _code_of(self, found: Any) -> str:
        """Note name and source; return the name, for a lambda with its source, which alone identifies it."""
        source = _source(found)
        self.names.append(_name_of(found))
        self.sources.append(source)
        return f"{self.names[-1]} {source}" if "<lambda>" in self.names[-1] else self.names[-1]

    def _no_form(self, value: Any) -> TypeError:
        kind = type(value).__qualname__
        a = "an" if kind[0] in "AEIOUaeiou" else "a"
        return misuse(TypeError(f"resume= with {self._whose}, {a} {kind}, which has no form by which a later sweep "
                                f"could find it again; allowed: {_ALLOWED}"))  # fmt: skip


def says_all_of_itself(value: object) -> bool:
    """True for numbers of any kind, dtypes and devices, which their ``str`` describes fully."""
    if isinstance(value, numbers.Number) and type(value).__module__ in _NUMBERS:
        return True
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # else there is no such value
    kinds = (numpy.generic, numpy.dtype) if numpy else ()
    return isinstance(value, kinds + ((torch.dtype, torch.device) if torch else ()))


def _held_by(function: types.FunctionType, *, whole: bool) -> dict[str, Any]:
    """Return what a function holds, by name: its closure; with ``whole`` also defaults, which else are arguments."""
    held: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # it is assigned later
            held[name] = None
    if whole and (function.__defaults__ or function.__kwdefaults__):
        held["its defaults"] = [list(function.__defaults__ or ()), function.__kwdefaults__]
    return held


def _is_code(value: object) -> bool:
    """True for functions and classes, also those of C that are a module's or a class's."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    return isinstance(value, types.FunctionType | type)


def _is_only_a_wrapper(value: Any) -> bool:
    """True for decorated functions (``launcher``) and caches, which do not change what is returned."""
    return hasattr(value, "__wrapped__") and type(value).__module__.partition(".")[0] in {"mlaunch", "functools"}


def _name_of(found: Any) -> str:
    """Return the name with its module; a script's is the same whether it is run or imported."""
    module = found.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        file = os.path.basename(getattr(main, "__file__", None) or module)
        module = getattr(getattr(main, "__spec__", None), "name", None) or os.path.splitext(file)[0]
    return f"{module}.{found.__qualname__}"


def _source(found: Any) -> str:
    """Return a hash of the code; "" if it is not in Python."""
    code = getattr(found, "__code__", None)
    compiled = "" if code is None else _compiled(code)
    try:
        text = inspect.getsource(found if code is None else code)  # its own, not that of what it wraps
    except (OSError, TypeError):  # from a prompt, or not in Python
        return _hash(compiled) if compiled else ""
    # One line may contain many lambdas.
    return _hash(text + compiled if found.__name__ == "<lambda>" else text)


def _compiled(code: types.CodeType) -> str:
    constants = [
        _compiled(one) if isinstance(one, types.CodeType) else sorted(map(repr, one)) if type(one) is frozenset
        else repr(one) for one in code.co_consts
    ]  # fmt: skip
    return f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {constants}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
