"""How a function is sent: by reference if the rank can import it, by value otherwise."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle.cloudpickle

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.by_value import is_importable


class Reference(NamedTuple):
    """A function as module, qualified name and number of ``__wrapped__`` layers (decorators, the launcher)."""

    module: str
    qualname: str
    depth: int


@frozen_record
class Call:
    """A call, as a rank receives it.

    ``freed``: numbers of held values that a rank which stays must release first. ``held``: the number under which the
    rank must hold the function's result. ``seed``: of this call. ``name``: for messages, "" to use the function's name;
    it is not sent.
    """

    function: Reference | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    freed: tuple[int, ...] = ()
    held: int | None = None
    seed: int | str | None = None
    name: str = ""

    def __init__(
        self,
        function: Reference | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        freed: tuple[int, ...] = (),
        held: int | None = None,
        seed: int | str | None = None,
        name: str = "",
    ) -> None:
        # Written by hand, since each short call needs two, and one in each rank.
        self.__dict__.update(function=function, args=args, kwargs=kwargs, freed=freed, held=held, seed=seed, name=name)


def to_plain(call: Call) -> tuple[object, ...]:
    """Return the call in types that pickle knows by itself, which is faster."""
    function: object = call.function
    if isinstance(function, Reference):
        function = tuple(function)
    # pickle would look up the class by its name in each rank, for every short call.
    return function, call.args, call.kwargs, call.freed, call.held, call.seed


def from_plain(fields: tuple[Any, ...]) -> Call:
    """Return the call that ``to_plain`` made plain."""
    function, *rest = fields
    return Call(Reference(*function) if type(function) is tuple else function, *rest)


def portable(function: Reference | Callable[..., Any]) -> Reference | Callable[..., Any]:
    """Return ``function`` as it should be pickled.

    pickle refuses a function if its name in its module leads to another object, as for every decorated function.
    cloudpickle would then send a copy that no longer shares its module's globals. So an importable function is sent by
    name, and the rank unwraps what it finds under that name.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str)) or not _importable(module):
        return function
    found: Any = _look_up(module, qualname)
    depth = 0
    while found is not None and found is not function:
        found = getattr(found, "__wrapped__", None)
        depth += 1
    return function if found is None else Reference(module, qualname, depth)


def _importable(module: str) -> bool:
    loaded = sys.modules.get(module)
    by_value = cloudpickle.cloudpickle.list_registry_pickle_by_value()
    return (
        module not in {"__main__", "__mp_main__"}
        and getattr(loaded, "__spec__", None) is not None
        and is_importable(module)
        # If users register a package with cloudpickle, they want its functions by value, decorated or not.
        and not any(module == name or module.startswith(name + ".") for name in by_value)
    )


def _look_up(module: str, qualname: str) -> Any:
    found: Any = sys.modules[module]
    for name in qualname.split("."):
        # Statically: the usual getattr on a class returns a launcher that is bound to nothing.
        found = vars(found).get(name) if type(found) is types.ModuleType else inspect.getattr_static(found, name, None)
        if found is None:
            return None
    return found


def resolve(function: Reference | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, in the rank. Raises the ImportError or AttributeError of importing its module."""
    if not isinstance(function, Reference):
        return function
    if function.module not in sys.modules:
        importlib.import_module(function.module)
    found = _look_up(function.module, function.qualname)
    for _ in range(function.depth):
        found = getattr(found, "__wrapped__", None)
    if not callable(found):
        raise AttributeError(
            f"module {function.module!r} in this rank has no function {function.qualname!r}: "
            f"it differs from the one that the caller imported"
        )
    return found  # type: ignore[no-any-return]
