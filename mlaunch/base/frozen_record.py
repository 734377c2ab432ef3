"""Records that cost nothing to define: frozen dataclasses without generated code.

dataclasses compiles six methods for each frozen class, in half a millisecond. A first call in a fresh interpreter took
4.11 s of CPU in all its processes with these, 4.21 s with ``dataclass(frozen=True)`` (medians of 20 rounds in turn on
two busy cores; the least 3.41 and 3.55), of which the caller's process took 0.56 and 0.60 s (the least 0.42 and 0.48).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from inspect import Signature

    from typing_extensions import dataclass_transform
else:  # which Python 3.10 lacks

    def dataclass_transform(**_: object) -> Callable[[_Function], _Function]:
        return lambda function: function


_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function")


class _Shape(NamedTuple):
    """The facts about a class that the methods use.

    ``whole``: how many values given by position are all that there are; -1: never. ``by_name``: what may be given by
    name, by how many are given by position. ``filled``: how many values there are.
    """

    whole: int
    by_position: tuple[str, ...]
    by_name: tuple[frozenset[str], ...]
    filled: int
    defaults: dict[str, Any]
    factories: tuple[tuple[str, Callable[[], Any]], ...]
    shown: tuple[str, ...]
    compared: tuple[str, ...]
    completes: bool  # it has a __post_init__


_shapes: dict[type, _Shape] = {}
_records: list[type] = []  # all classes


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen_record(cls: _Class) -> _Class:
    """Make the class what ``dataclass(frozen=True)`` makes of it: in use, in a pickle, and for dataclasses' functions.

    Methods that the class defines itself stay.
    """
    own = set(vars(cls))
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    for name, method in _METHODS.items():
        if name not in own:
            setattr(cls, name, method)
    _records.append(cls)
    return cls


def read_shapes() -> None:
    """Read the facts about all record classes, for forks: each would do it at its first record of a class."""
    for cls in _records:
        _shape_of(cls)


def _shape_of(cls: type) -> _Shape:
    found = _shapes.get(cls)
    if found is None:
        # Read at the first instance: most commands make none of most records.
        found = _shapes[cls] = _read(cls)
    return found


def _read(cls: type) -> _Shape:
    fields = dataclasses.fields(cls)
    taken = [field.name for field in fields if field.init]
    first = tuple(field.name for field in fields if field.init and not field.kw_only)
    none = dataclasses.MISSING
    defaults = {field.name: field.default for field in fields if field.default is not none}
    factories = {field.name: field.default_factory for field in fields if field.default_factory is not none}
    filled, completes = len({*taken, *defaults, *factories}), hasattr(cls, "__post_init__")
    return _Shape(
        whole=len(first) if len(first) == filled and not completes else -1,
        by_position=first,
        by_name=tuple(frozenset(taken).difference(first[:given]) for given in range(len(first) + 1)),
        filled=filled,
        defaults=defaults,
        factories=tuple(factories.items()),
        shown=tuple(field.name for field in fields if field.repr),
        compared=tuple(field.name for field in fields if field.compare),
        completes=completes,
    )


def _init(self: Any, /, *given: Any, **named: Any) -> None:
    shape = _shapes.get(type(self)) or _shape_of(type(self))
    if len(given) == shape.whole and not named:  # most
        self.__dict__.update(zip(shape.by_position, given))  # noqa: B905 - they are as many
        return
    if len(given) > len(shape.by_position) or not named.keys() <= shape.by_name[len(given)]:
        raise _refusal(type(self), given, named)
    # Written past __setattr__, which refuses, as dataclasses does by object.__setattr__.
    values = self.__dict__
    values.update(shape.defaults)
    values.update(zip(shape.by_position, given))  # noqa: B905 - there may be fewer
    values.update(named)
    for name, make in shape.factories:
        if name not in values:
            values[name] = make()
    if len(values) < shape.filled:
        raise _refusal(type(self), given, named)
    if shape.completes:
        self.__post_init__()


def _refusal(cls: type, given: tuple[Any, ...], named: dict[str, Any]) -> TypeError:
    try:
        _signature_of(cls).bind(*given, **named)
    except TypeError as error:
        return TypeError(f"{cls.__name__}: {error}")
    raise AssertionError(cls)


def _signature_of(cls: type) -> Signature:
    from inspect import Parameter, Signature  # which takes longer than all records

    parameters = []
    for field in sorted(
        (field for field in dataclasses.fields(cls) if field.init), key=lambda field: bool(field.kw_only)
    ):
        found = [value for value in (field.default, field.default_factory) if value is not dataclasses.MISSING]
        default = found[0] if found else Parameter.empty
        kind = Parameter.KEYWORD_ONLY if field.kw_only else Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(Parameter(field.name, kind, default=default, annotation=field.type))
    return Signature(parameters)


class _Signature:
    """A descriptor for ``__signature__``, by which ``inspect`` learns what the class takes."""

    def __get__(self, instance: object, owner: type) -> Signature:
        if instance is None:
            return _signature_of(owner)
        raise AttributeError("__signature__")


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in _shape_of(type(self)).shown)
    return f"{type(self).__qualname__}({shown})"


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in _shape_of(type(self)).compared)


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _set(_self: Any, name: str, _value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(_self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = {
    "__init__": _init,
    "__signature__": _Signature(),
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _set,
    "__delattr__": _delete,
}
