"""The names that cells have left in this rank: pulled to the notebook, pushed from there, listed, or completed."""

from __future__ import annotations

import ast
import builtins
import keyword
import os
import resource
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlaunch.base.frames import is_library
from mlaunch.cells.rank.run_cell import main, rank
from mlaunch.cells.wire import NamesOfRank
from mlaunch.rank.safe_inspection import (
    MISSING,
    in_classes,
    is_a,
    is_just,
    mro,
    names_of_class,
    own_names,
    registries,
    size,
    type_name,
)

_NO_VALUES = (types.ModuleType, types.FunctionType, type)  # what cells import or define
_IPYTHONS = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})  # names


def pull(names: Sequence[str], targets: Sequence[int] | None) -> dict[str, Any] | None:
    """Return the values of these names that are here; None on a rank that is not a target."""
    if targets is not None and rank() not in targets:
        return None
    found = vars(main)
    return {name: found[name] for name in names if name in found}


def push(values: Mapping[str, Any], targets: Sequence[int] | None) -> None:
    """Set names on the targets."""
    if targets is None or rank() in targets:
        vars(main).update(values)


def describe_names() -> NamesOfRank:
    """Return the names of this rank, and its memory."""
    import torch

    values = {name: value for name, value in list(vars(main).items()) if is_value(name, value)}
    names = {name: _type_and_size(value) for name, value in values.items() if not name.startswith("_")}
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    cuda: Any = torch.cuda  # untyped in part
    # Only if cells have used CUDA: to ask would initialize it, which takes hundreds of MB of the device.
    on_device = cuda.memory_allocated() if cuda.is_initialized() else 0
    return NamesOfRank(os.getpid(), resident, on_device, names)


def is_value(name: object, value: object) -> bool:
    """True for a cell's own value: not IPython's names, and no imports or definitions, which take no memory."""
    return type(name) is str and name not in _IPYTHONS and not any(is_a(value, kind) for kind in _NO_VALUES)


def _type_and_size(value: object) -> tuple[str, int]:
    """Return the type and the bytes of a value; "?" and 0 if they are unknown."""
    try:
        return type_name(value), size(value)
    except Exception:  # some fields in C raise
        return "?", 0


# Completion, without running user code: one rank answers while the others do nothing, so a property or a ``__dir__``
# that communicates would wait for ever. IPython's own completer, however guarded, calls ``__dir__`` and
# ``__getattribute__``, and does not find the parts of a ``torch.nn.Module``.


class UnknownError(Exception):
    """The object does not exist, or finding it would run user code."""


def find_names(kind: str, source: str, prefix: str, asked: int) -> list[str] | None:
    """Return the names with a prefix, sorted; None on all ranks but the one that is asked.

    Args:
        kind: "names" that a cell can use, "values" that cells have left, "attributes" or "keys" of an object.
        source: The object, as ``model.layers[0]``.
        prefix: How they begin. Names with an underscore are found only if this has one.
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
    return [name for name, value in list(vars(main).items()) if is_value(name, value)]


def _attributes(source: str) -> Iterable[str]:
    value = _value(ast.parse(source, mode="eval").body)
    if _has_names_of_library(value):
        return dir(value)
    classes = mro(value if is_a(value, type) else type(value))
    found = {name for one in classes for name in names_of_class(one)} | own_names(value).keys()
    # The parts of a Sequential are "0", "1", ..., which cannot follow a dot.
    return (name for name in found.union(*registries(value)) if type(name) is str and name.isidentifier())


def _keys(source: str) -> Iterable[str]:
    value = _value(ast.parse(source, mode="eval").body)
    if not is_a(value, dict):
        raise UnknownError
    return dict.keys(value)


_FINDERS: dict[str, Callable[[str], Iterable[str]]] = {
    "names": _all_names,
    "values": _values,
    "attributes": _attributes,
    "keys": _keys,
}


def _value(node: ast.expr) -> Any:
    """Return the value of an expression, if it can be looked up."""
    match node:
        case ast.Name(name):
            found = vars(main).get(name, vars(builtins).get(name, MISSING))
            if found is MISSING:
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
    for own in (own_names(value), *registries(value)):
        if name in own:
            return own[name]
    found = in_classes(mro(value if is_a(value, type) else type(value)), name)
    if found is MISSING:
        raise UnknownError
    if is_a(found, types.FunctionType):
        return found
    is_slot = is_just(found, types.MemberDescriptorType)
    if is_slot or (is_just(found, types.GetSetDescriptorType) and _is_plain_tensor(value)):
        return found.__get__(value)
    if any("__get__" in names_of_class(one) for one in mro(type(found))):  # a property, and the like
        raise UnknownError
    return found


def _item(value: Any, key: Any) -> Any:
    """Look up an item. LookupError, TypeError: there is none."""
    for kind in (list, tuple):
        if is_a(value, kind):
            return kind.__getitem__(value, key)
    if is_a(value, dict):
        found = dict.get(value, key, MISSING)
    elif _is_container_of_torch(type(value)):
        modules = own_names(value)["_modules"]
        found = list(modules.values())[key] if type(key) is int else modules[key]
    else:
        found = MISSING
    if found is MISSING:
        raise UnknownError
    return found


def _has_names_of_library(value: Any) -> bool:
    """True if a library's own ``__dir__`` knows more: lazy modules, and columns of pandas' frames."""
    kind = type(value)
    if not is_a(value, types.ModuleType):
        module = in_classes((kind,), "__module__")
        return is_just(module, str) and module.startswith("pandas.")
    names = own_names(value)
    file = names.get("__file__")
    return (kind is not types.ModuleType or "__dir__" in names) and is_just(file, str) and is_library(str(file))


def _is_plain_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and is_just(value, torch.Tensor, torch.nn.Parameter)


def _is_container_of_torch(kind: type) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    item = in_classes(mro(kind), "__getitem__")
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    return any(item is names_of_class(one)["__getitem__"] for one in containers)
