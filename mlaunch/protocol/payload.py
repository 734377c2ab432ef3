"""Values in memfds: pickled once by the sender, mapped privately by every receiver.

A payload is a file in memory::

    pickle stream (protocol 5) | buffer, 64-byte aligned | ... | table of (offset, size) | trailer

Arrays and storages of at least 16 KiB stay out of the stream. A receiver maps the file copy-on-write, so its arrays
and tensors are writable, cost no further copy, and eight ranks that only read share one copy of a large argument.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import mmap
import os
import pickle
import struct
import sys
import types
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import IO, Any

import cloudpickle

from mlaunch.base import linux
from mlaunch.protocol import tensors

_OUT_OF_BAND = 16 * 1024  # bytes; below, a buffer costs less inside the stream than an entry of its own
_ALIGNMENT = 64
_CACHED = type(functools.lru_cache(len))
_ENTRY = struct.Struct("<QQ")  # offset, size
_TRAILER = struct.Struct("<QQ")  # size of the stream, number of buffers


def create(name: str) -> int:
    """Makes an empty memfd, to be filled by ``write``. Closed on exec."""
    return linux.above_standard(os.memfd_create(f"mlaunch-{name}", os.MFD_CLOEXEC))


def write(fd: int, value: object, *, to_caller: bool = False) -> int:
    """Replaces what the memfd holds by ``value``; returns the size in bytes.

    ``to_caller``: the value goes from a rank to its caller, who has the classes of ``__main__`` that the rank has,
    so they go by name where they can. In the other direction they go by value.

    Raises what pickling the value raises (``explain.unpicklable`` finds the culprit).
    """
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "wb", closefd=False) as file:
        parts = (pickle_by_name if to_caller else _pickle_by_value)(file, value)
        stream_size = file.tell()
        table = bytearray()
        for buffer in parts.buffers:
            with buffer.raw() as raw:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                table += _ENTRY.pack(file.tell(), raw.nbytes)
                file.write(raw)
        file.write(table + _TRAILER.pack(stream_size, len(parts.buffers)))
        return file.tell()


@dataclass
class Parts:
    """What a pickling leaves besides its stream: the buffers, and what must live until they are written."""

    buffers: list[pickle.PickleBuffer] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)

    def stays_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if view.nbytes < _OUT_OF_BAND:
                return True
        self.buffers.append(buffer)
        return False


def pickle_by_name(file: IO[bytes], value: object) -> Parts:
    """Pickles to a reader that has the classes of ``__main__``; what cannot go by name goes by value."""
    try:
        return _pickle_with(_ByNamePickler, copyreg.dispatch_table, file, value)
    except Exception:  # a lambda, a local class, or what a __reduce__ raises, which it will raise again
        file.seek(0)
        file.truncate()
        return _pickle_by_value(file, value)


def _pickle_by_value(file: IO[bytes], value: object) -> Parts:
    table = ChainMap({_CACHED: _reduce_cached}, cloudpickle.Pickler.dispatch_table)
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


def _pickle_with(base: type[pickle.Pickler], table: MutableMapping[Any, Any], file: IO[bytes], value: object) -> Parts:
    parts = Parts()
    pickler = base.__new__(base)
    reducers: ChainMap[Any, Any] = ChainMap(tensors.reducers(parts.alive), table)
    pickler.dispatch_table = reducers  # a pickler reads it when it is initialised
    pickler.__init__(file, protocol=5, buffer_callback=parts.stays_in_band)  # type: ignore[misc]
    pickler.dump(value)
    return parts


def check(value: object) -> None:
    """Raises what pickling ``value`` raises, keeping nothing of it."""
    with open(os.devnull, "wb") as sink:
        _pickle_by_value(sink, value)


def read(fd: int) -> Any:
    """Returns the value in a memfd. The caller may close ``fd``: arrays and tensors hold the mapping."""
    size = os.fstat(fd).st_size
    if size < _OUT_OF_BAND:  # no buffer can be in it, and it is not worth a mapping
        return pickle.loads(os.pread(fd, size, 0))
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    stream_size, count = _TRAILER.unpack_from(view, size - _TRAILER.size)
    table = view[size - _TRAILER.size - count * _ENTRY.size : size - _TRAILER.size]
    buffers = [view[offset : offset + length] for offset, length in _ENTRY.iter_unpack(table)]
    try:
        return pickle.loads(view[:stream_size], buffers=buffers)
    finally:
        del view, table, buffers  # which the traceback of a failure would keep, and with them the mapping
