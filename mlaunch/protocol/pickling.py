"""How values are pickled: by name or by value, with their large buffers left out.

Torch's storages go as out-of-band buffers, and always come back on the CPU. Tensors, parameters, sparse and quantized
tensors keep torch's own ``__reduce_ex__``, which takes every one of them apart into storages. Only the storages are
reduced here: torch's reducers for them either copy the bytes twice (``torch.save``) or pass a file descriptor that is
dead once the worker has exited (``torch.multiprocessing``).
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle.cloudpickle

from mlaunch.protocol import by_value, reducers
from mlaunch.protocol.by_value import is_importable

if TYPE_CHECKING:
    import torch

OUT_OF_BAND = 16 * 1024  # bytes; below, a buffer costs less inside the stream than an entry of its own
_FUNCTION = types.FunctionType


class Sink(Protocol):
    """The file that a pickler writes to."""

    def write(self, data: Any, /) -> Any: ...

    def seek(self, place: int, /) -> int: ...

    def truncate(self) -> int: ...


@dataclass
class Parts:
    """The result of a pickling beside its stream: the buffers, and what must live until they are written.

    ``originals``: classes and functions that went by value, which may come back as long as they live. ``told``: names
    of files that do not exist, whose source went with the stream.
    """

    in_band: bool = False  # all buffers must be in the stream
    buffers: list[pickle.PickleBuffer] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)
    originals: list[object] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def stays_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if self.in_band or view.nbytes < OUT_OF_BAND:
                return True
        self.buffers.append(buffer)
        return False


def pickle_by_name(file: Sink, value: object, *, in_band: bool = False) -> Parts:
    """Pickle for a reader that has what the call brought; what has neither a number nor a name goes by value."""
    # Asking for numbers takes 0.2 us for each object of a value, so it is left out if nothing has a number.
    base = _ByNumberPickler if by_value.any_came() else _ByNamePickler
    try:
        return _pickle_with(base, dict(copyreg.dispatch_table), file, value, Parts(in_band))
    except Exception:  # a lambda, a local class, or an error of a __reduce__, which it will raise again
        # What was written by name before the failure is useless.
        file.seek(0)
        file.truncate()
        return pickle_by_value(file, value, _BackByValuePickler, in_band=in_band)


class _ByNamePickler(pickle.Pickler):
    """A pickler that can have a table of its own."""


class _ByNumberPickler(pickle.Pickler):
    """A pickler that knows the caller's own classes and functions."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)  # asked for each object, so this is written out
        if kind is _FUNCTION or issubclass(kind, type) or kind in by_value.kinds:
            return by_value.reduce_or_refuse(obj) or NotImplemented
        return NotImplemented


def _submodules(code: types.CodeType, top_level_dependencies: Iterable[object]) -> list[types.ModuleType]:
    """Return the submodules that code is likely to use as attributes of packages among its dependencies.

    They are imported where the code goes. cloudpickle finds the same, but looks at each module of the process for each
    package: with torch imported, that is nearly all the time that pickling a function takes.
    """
    names = dict.fromkeys(code.co_names)
    modules = (value for value in top_level_dependencies if isinstance(value, types.ModuleType))
    packages = [module.__name__ for module in modules if getattr(module, "__package__", None)]
    found = []
    for package in packages:
        for name in names:
            if (module := sys.modules.get(f"{package}.{name}")) is not None:
                found.append(module)
                packages.append(f"{package}.{name}")  # by the name it was found under, which may not be its own
    return found


def _with(function: Any, **others: object) -> Any:
    """Return a function of cloudpickle's that finds ``others`` in place of some of its globals."""
    return types.FunctionType(
        function.__code__, function.__globals__ | others, function.__name__, function.__defaults__, function.__closure__
    )


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])


def _quick_reduce() -> Any:
    """Return the reducer for functions that uses ``_submodules``; cloudpickle's own if that has changed there."""
    reduce = getattr(cloudpickle.Pickler, "_dynamic_function_reduce", None)
    state = getattr(cloudpickle.cloudpickle, "_function_getstate", None)
    find = getattr(cloudpickle.cloudpickle, "_find_imported_submodules", None)
    known = all(isinstance(one, _FUNCTION) for one in (reduce, state, find))
    if not known or _parameters(find) != _parameters(_submodules):
        return reduce
    return _with(reduce, _function_getstate=_with(state, _find_imported_submodules=_submodules))


class _ByValuePickler(cloudpickle.Pickler):
    """A pickler that sends modules with a class of their own (``torch.backends.cudnn``, ``torch.ops``) by name."""

    parts: Parts
    cells: dict[int, types.CellType]
    _dynamic_function_reduce = _quick_reduce()

    def _function_getnewargs(self, func: Any) -> Any:
        """Return the parts of a function; functions that share a variable get one cell, which they fill."""
        found = super()._function_getnewargs(func)  # type: ignore[misc]
        if not found[-1]:
            return found
        cells = zip(func.__closure__, found[-1], strict=True)
        return *found[:-1], tuple(self.cells.setdefault(id(cell), empty) for cell, empty in cells)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _FUNCTION or issubclass(kind, type):
            _look_at(obj.__module__)
            if kind is _FUNCTION:
                reducers.look_into_class_bodies(obj.__code__)
            again = reducers.of_function(obj) if kind is _FUNCTION else None
            return self._numbered(obj, super().reducer_override(obj)) if again is None else self._known(obj, again)
        if kind is types.ModuleType:
            _look_at(obj.__name__)
        if kind in self.dispatch_table:
            return NotImplemented
        if issubclass(kind, types.ModuleType):
            return self._module(obj)
        if issubclass(kind, functools.cached_property):
            return reducers.reduce_property(obj)
        if not reducers.is_own(kind):
            return super().reducer_override(obj)
        reduced = obj.__reduce_ex__(5)  # as pickle does
        again = reducers.of_name(obj, reduced)
        return reduced if again is reduced else self._known(obj, again)

    def _module(self, module: types.ModuleType) -> Any:
        """Reduce a module that has a class of its own."""
        name = getattr(module, "__name__", "")
        if sys.modules.get(name) is module:
            return importlib.import_module, (name,)
        return super().reducer_override(module)

    def _known(self, found: Any, reduced: Any) -> Any:
        """Give a number to an object that is known by its identity, not by its content."""
        if not by_value.can_be_known(found):
            return reduced
        self.parts.originals.append(found)
        make, args, *rest = reduced
        return by_value.take_once, (by_value.number(found), make, *args), *rest

    def _numbered(self, definition: Any, reduced: Any) -> Any:
        if not isinstance(reduced, tuple) or len(reduced) != 6:  # by name, or a type of Python's own
            return reduced
        self.parts.originals.append(definition)
        make, args, state, _, _, fill_in = (
            reducers.of_class(definition, reduced) if isinstance(definition, type) else reduced
        )
        code = getattr(definition, "__code__", None)
        source = None if code is None else by_value.source_of(code, self.parts.told)
        taken = by_value.number(definition), make, *args
        return by_value.take, taken, (fill_in, state, source), None, None, by_value.fill


class _BackByValuePickler(_ByValuePickler):
    """A pickler by value that still sends the caller's own objects by number."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        is_known = kind is _FUNCTION or issubclass(kind, type) or kind in by_value.kinds
        return (is_known and by_value.reduce(obj)) or super().reducer_override(obj)


def pickle_by_value(
    file: Sink, value: object, base: type[_ByValuePickler] = _ByValuePickler, *, in_band: bool = False
) -> Parts:
    """Pickle for a reader that has not what this process defines in scripts and notebooks."""
    table = {}
    for part in reversed(cloudpickle.Pickler.dispatch_table.maps):
        table.update(part)
    table.update(reducers.table())
    return _pickle_with(base, table, file, value, Parts(in_band))


def _look_at(module: object) -> None:
    """Register a module that ranks cannot import, for good: another thread may be pickling something of it."""
    if isinstance(module, str) and not is_importable(module):
        cloudpickle.cloudpickle.register_pickle_by_value(sys.modules[module])


def _pickle_with(base: type[pickle.Pickler], table: dict[Any, Any], file: Sink, value: object, parts: Parts) -> Parts:
    """Pickle with ``base``. ``table`` must be a plain dict, since pickle looks into it for each object."""
    pickler: Any = base.__new__(base)
    pickler.parts, pickler.cells = parts, {}
    pickler.dispatch_table = table | _storage_reducers(parts.alive)  # a pickler reads it when it is initialized
    # The table is set first: C's pickler reads it once.
    pickler.__init__(file, protocol=5, buffer_callback=parts.stays_in_band)
    pickler.dump(value)
    return parts


# Tensors

Reduction = tuple[Callable[..., Any], tuple[Any, ...]]
Reducers = dict[type, Callable[[Any], Reduction]]


def _storage_reducers(alive: list[object]) -> Reducers:
    """Return the reducers of one pickling. They append to ``alive`` what must live until the buffers are written.

    Empty unless torch is imported: without it there are no tensors.
    """
    if "torch" not in sys.modules:
        return {}
    import torch

    def reduce_typed(storage: torch.storage.TypedStorage) -> Reduction:
        return _rebuild_typed, (storage._untyped_storage, storage.dtype)  # one object for all views of a storage

    def reduce_untyped(storage: torch.UntypedStorage) -> Reduction:
        on_cpu = storage if storage.device.type == "cpu" else _to_cpu(storage)
        # The buffer is an address: the memory must live until it is written.
        alive.extend((storage, on_cpu))
        return rebuild_storage, (_buffer(on_cpu),)

    def reduce_tensor(tensor: Any) -> Any:
        rebuild, args, *rest = tensor.__reduce_ex__(5)
        if args and isinstance(args[0], torch.UntypedStorage):
            # torch takes its newer dtypes apart into untyped storages, but can only rebuild them from typed ones.
            args = (_rebuild_typed(args[0], torch.uint8), *args[1:])
        return rebuild, args, *rest

    return {
        torch.Tensor: reduce_tensor,
        torch.storage.TypedStorage: reduce_typed,
        torch.UntypedStorage: reduce_untyped,
    }


def _to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    import torch

    # Wait for it: a copy that is still in progress would be pickled half.
    return torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage().copy_(storage, non_blocking=False)


def _buffer(storage: torch.UntypedStorage) -> pickle.PickleBuffer | bytearray:
    size = storage.nbytes()
    if size == 0:
        return bytearray()
    return pickle.PickleBuffer((ctypes.c_char * size).from_address(storage.data_ptr()))


def _rebuild_typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    import torch

    kind: Any = torch.storage.TypedStorage  # torch leaves it untyped
    typed: torch.storage.TypedStorage = kind(wrap_storage=untyped, dtype=dtype, _internal=True)
    return typed


def rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    """Return a storage over a writable buffer, without a copy."""
    import torch

    if not memoryview(buffer).nbytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
