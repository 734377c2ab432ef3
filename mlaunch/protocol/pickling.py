"""How values are pickled: by name or by value, their large buffers left out."""

from __future__ import annotations

import copyreg
import functools
import importlib
import pickle
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle

from mlaunch.protocol import tensors

OUT_OF_BAND = 16 * 1024  # bytes; below, a buffer costs less inside the stream than an entry of its own
_CACHED = type(functools.lru_cache(len))


class Sink(Protocol):
    """What is pickled into."""

    def write(self, data: Any, /) -> Any: ...

    def seek(self, place: int, /) -> int: ...

    def truncate(self) -> int: ...


@dataclass
class Parts:
    """What a pickling leaves besides its stream: the buffers, and what must live until they are written."""

    buffers: list[pickle.PickleBuffer] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)

    def stays_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if view.nbytes < OUT_OF_BAND:
                return True
        self.buffers.append(buffer)
        return False


def pickle_by_name(file: Sink, value: object) -> Parts:
    """Pickles to a reader that has the classes of ``__main__``; what cannot go by name goes by value."""
    try:
        return _pickle_with(_ByNamePickler, dict(copyreg.dispatch_table), file, value)
    except Exception:  # a lambda, a local class, or what a __reduce__ raises, which it will raise again
        file.seek(0)
        file.truncate()
        return pickle_by_value(file, value)


def pickle_by_value(file: Sink, value: object) -> Parts:
    table = {}
    for part in reversed(cloudpickle.Pickler.dispatch_table.maps):
        table.update(part)
    table[_CACHED] = _reduce_cached
    return _pickle_with(_ByValuePickler, table, file, value)


class _ByNamePickler(pickle.Pickler):
    """One that can have a table of its own."""


class _ByValuePickler(cloudpickle.Pickler):
    """Knows modules that are instances of a class of their own (``torch.backends.cudnn``, ``torch.ops``) by name."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is not types.ModuleType and issubclass(kind, types.ModuleType):
            name = getattr(obj, "__name__", "")
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        return super().reducer_override(obj)


def _reduce_cached(function: Any) -> str | tuple[Any, ...]:
    """Reduces functools.lru_cache and cache, which cloudpickle takes for importable even in ``__main__``."""
    if function.__module__ != "__main__" and "<locals>" not in function.__qualname__:
        return str(function.__qualname__)
    return _cache_again, (function.__wrapped__, function.cache_parameters())


def _cache_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _pickle_with(base: type[pickle.Pickler], table: dict[Any, Any], file: Sink, value: object) -> Parts:
    """``table``: a plain dict, since pickle asks it for each object."""
    parts = Parts()
    pickler = base.__new__(base)
    pickler.dispatch_table = table | tensors.reducers(parts.alive)  # a pickler reads it when it is initialised
    pickler.__init__(file, protocol=5, buffer_callback=parts.stays_in_band)  # type: ignore[misc]
    pickler.dump(value)
    return parts
