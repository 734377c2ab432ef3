"""Inspection of objects that runs no code of their classes, which might communicate, or raise."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a module of torch
_C_FIELDS = (types.GetSetDescriptorType, types.MemberDescriptorType)
MISSING = object()
mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__  # a metaclass may have another
names_of_class: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


def in_classes(classes: tuple[type, ...], name: str) -> Any:
    """Return what the first of the classes has under that name; MISSING: none has."""
    return next((names_of_class(one)[name] for one in classes if name in names_of_class(one)), MISSING)


def is_a(value: Any, kind: type) -> bool:
    """True if it is an instance. ``isinstance`` would ask the object, and ``in`` the classes."""
    return any(one is kind for one in mro(type(value)))


def is_just(value: Any, *kinds: type) -> bool:
    """True if it is of one of these classes, not of a subclass."""
    return any(type(value) is kind for kind in kinds)


def own_names(value: Any) -> Mapping[str, Any]:
    """Return what the object itself holds, not its class."""
    if is_a(value, type):
        return names_of_class(value)
    found = in_classes(mro(type(value)), "__dict__")
    if not is_just(found, *_C_FIELDS):
        return {}
    own = found.__get__(value)
    return own if is_just(own, dict) else {}


def registries(value: Any) -> list[Mapping[str, Any]]:
    """Return the parameters, buffers and submodules of a module of torch, which are no attributes of Python's."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not is_a(value, torch.nn.Module):
        return []
    own = own_names(value)
    return [own[name] for name in _REGISTRIES if is_just(own.get(name), dict, OrderedDict)]


def type_name(value: object) -> str:
    """Return the name of its class, with the module where that helps."""
    kind = type(value)
    module = in_classes((kind,), "__module__")
    name: str = type.__dict__["__qualname__"].__get__(kind)
    return f"{module}.{name}" if type(module) is str and module not in {"builtins", "__main__"} else name


def size(value: object) -> int:
    """Return the bytes of what can be large: tensors, modules, arrays, and these in lists, tuples, sets and dicts.

    Each is counted once.
    """
    seen: dict[int, object] = {}
    waiting, total = [value], 0
    while waiting:  # a list may hold itself, or be nested deeper than Python calls
        one = waiting.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            parts = _parts(one)
            waiting.extend(parts or ())
            total += _own_size(one) if parts is None else 0
    return total


def field(value: object, name: str) -> Any:
    """Return a field that its class has in C, as arrays and tensors have ``shape``; None: there is none."""
    found = in_classes(mro(type(value)), name)
    if not is_just(found, *_C_FIELDS):
        return None
    torch: Any = sys.modules.get("torch")
    if torch is None or not is_a(value, torch.Tensor):
        return found.__get__(value)
    with torch._C.DisableTorchFunctionSubclass():  # else a subclass of tensors would run its own code
        return found.__get__(value)


def _parts(value: Any) -> Iterable[object] | None:
    """Return what it consists of; None: it counts as a whole."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and is_a(value, torch.nn.Module):
        return [part for registry in registries(value) for part in registry.values()]  # plain dicts
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if is_a(value, kind):
            return list(kind.__iter__(value))
    return list(dict.values(value)) if is_a(value, dict) else None


def _own_size(value: Any) -> int:
    nbytes = field(value, "nbytes")
    if is_just(nbytes, int):
        return int(nbytes)
    # Of anything else only the object counts: its references may lead through the whole process.
    if is_just(value, bytes, bytearray):
        return len(value)
    is_builtin = type.__dict__["__module__"].__get__(type(value)) == "builtins"
    return sys.getsizeof(value, 0) if is_builtin else object.__sizeof__(value)
