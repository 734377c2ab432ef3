"""Names for completion, found by looking alone: no user code runs.

One rank answers while the others do nothing, so a property or a ``__dir__`` that communicates would wait for ever.
IPython's own completer, however guarded, calls ``__dir__`` and ``__getattribute__``, and has nothing to say of a
module's submodules.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlaunch.base.frames import is_library
from mlaunch.rank.cells.run_cell import main, rank

_NO_VALUES = (types.ModuleType, types.FunctionType, type)
_IPYTHONS = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})
_REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a module of torch
_MISSING = object()
_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__  # a metaclass may have another
_names_of_class: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


class UnknownError(Exception):
    """To find it out would take user code, or there is no such thing."""


def find_names(kind: str, source: str, prefix: str, asked: int) -> list[str] | None:
    """Returns the names that begin so, sorted; None on all ranks but the one that is asked.

    Args:
        kind: "names" that a cell can use, "values" that cells have left, "attributes" or "keys" of an object.
        source: The object, as ``model.layers[0]``.
        prefix: How they begin. Names with an underscore are told only if that has one.
        asked: The rank.
    """
    if rank() != asked:
        return None
    try:
        found = _FINDERS[kind](source)
    except (UnknownError, SyntaxError, ValueError, RecursionError):
        return []
    hidden = "" if prefix.startswith("__") or kind == "keys" else "__" if prefix.startswith("_") else "_"
    fits = (name for name in found if type(name) is str and name.startswith(prefix))
    return sorted({name for name in fits if not hidden or not name.startswith(hidden)})


def _all_names(_: str) -> Iterable[str]:
    return [*(vars(main).keys() - {"In", "Out"}), *vars(builtins), *keyword.kwlist]


def _values(_: str) -> Iterable[str]:
    names = vars(main)
    return [name for name in names.keys() - _IPYTHONS if not any(_is_a(names[name], kind) for kind in _NO_VALUES)]


def _attributes(source: str) -> Iterable[str]:
    value = _value(ast.parse(source, mode="eval").body)
    if _has_names_of_library(value):
        return dir(value)
    classes = _mro(value if _is_a(value, type) else type(value))
    found = {name for one in classes for name in _names_of_class(one)} | _own_names(value).keys()
    return found.union(*_registries(value))


def _keys(source: str) -> Iterable[str]:
    value = _value(ast.parse(source, mode="eval").body)
    if not _is_a(value, dict):
        raise UnknownError
    return dict.keys(value)


_FINDERS: dict[str, Callable[[str], Iterable[str]]] = {
    "names": _all_names,
    "values": _values,
    "attributes": _attributes,
    "keys": _keys,
}


def _value(node: ast.expr) -> Any:
    """Returns what an expression stands for, if that can be looked up."""
    match node:
        case ast.Name(name):
            found = vars(main).get(name, vars(builtins).get(name, _MISSING))
            if found is _MISSING:
                raise UnknownError
            return found
        case ast.Attribute(inner, name):
            return _attribute(_value(inner), name)
        case ast.Subscript(inner, key):
            try:
                return _item(_value(inner), ast.literal_eval(key))
            except (LookupError, TypeError):
                raise UnknownError from None
    raise UnknownError


def _attribute(value: Any, name: str) -> Any:
    for own in (_own_names(value), *_registries(value)):
        if name in own:
            return own[name]
    found = _in_classes(_mro(value if _is_a(value, type) else type(value)), name)
    if found is _MISSING:
        raise UnknownError
    if _is_a(found, types.FunctionType):
        return found
    is_slot = _is_just(found, types.MemberDescriptorType)
    if is_slot or (_is_just(found, types.GetSetDescriptorType) and _is_plain_tensor(value)):
        return found.__get__(value)
    if any("__get__" in _names_of_class(one) for one in _mro(type(found))):  # a property, and the like
        raise UnknownError
    return found


def _item(value: Any, key: Any) -> Any:
    """Looks up an item. LookupError, TypeError: there is none."""
    for kind in (list, tuple):
        if _is_a(value, kind):
            return kind.__getitem__(value, key)
    if _is_a(value, dict):
        found = dict.get(value, key, _MISSING)
    elif _is_container_of_torch(type(value)):
        modules = _own_names(value)["_modules"]
        found = list(modules.values())[key] if type(key) is int else modules[key]
    else:
        found = _MISSING
    if found is _MISSING:
        raise UnknownError
    return found


def _own_names(value: Any) -> Mapping[str, Any]:
    """Returns what the object itself holds, not its class."""
    if _is_a(value, type):
        return _names_of_class(value)
    found = _in_classes(_mro(type(value)), "__dict__")
    if not _is_just(found, types.GetSetDescriptorType, types.MemberDescriptorType):
        return {}
    own = found.__get__(value)
    return own if _is_just(own, dict) else {}


def _registries(value: Any) -> list[Mapping[str, Any]]:
    """Returns the parameters, buffers and submodules of a module of torch, which are no attributes of Python's."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not _is_a(value, torch.nn.Module):
        return []
    own = _own_names(value)
    return [own[name] for name in _REGISTRIES if _is_just(own.get(name), dict, OrderedDict)]


def _in_classes(classes: tuple[type, ...], name: str) -> Any:
    return next((_names_of_class(one)[name] for one in classes if name in _names_of_class(one)), _MISSING)


def _is_a(value: Any, kind: type) -> bool:
    """Tells whether it is an instance. ``isinstance`` would ask the object, and ``in`` the classes."""
    return any(one is kind for one in _mro(type(value)))


def _is_just(value: Any, *kinds: type) -> bool:
    """Tells whether it is of one of these classes, not of one made of them."""
    return any(type(value) is kind for kind in kinds)


def _has_names_of_library(value: Any) -> bool:
    """Tells whether a library's own ``__dir__`` knows more: in its lazy modules, and columns in pandas' frames."""
    kind = type(value)
    if not _is_a(value, types.ModuleType):
        module = _in_classes((kind,), "__module__")
        return _is_just(module, str) and module.startswith("pandas.")
    names = _own_names(value)
    file = names.get("__file__")
    return (kind is not types.ModuleType or "__dir__" in names) and _is_just(file, str) and is_library(str(file))


def _is_plain_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and _is_just(value, torch.Tensor, torch.nn.Parameter)


def _is_container_of_torch(kind: type) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    item = _in_classes(_mro(kind), "__getitem__")
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    return any(item is _names_of_class(one)["__getitem__"] for one in containers)
