"""Values in memfds: pickled once by the sender, mapped privately by every receiver.

A payload is a file in memory::

    pickle stream (protocol 5) | buffer, 64-byte aligned | ... | table of (offset, size) | trailer

Arrays and storages of at least 16 KiB stay out of the stream. A receiver maps the file copy-on-write, so its arrays
and tensors are writable, cost no further copy, and eight ranks that only read share one copy of a large argument.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections import ChainMap
from typing import Any

import cloudpickle

from mlaunch.runtime import tensors

_OUT_OF_BAND = 16 * 1024  # bytes; below, a buffer costs less inside the stream than an entry of its own
_ALIGNMENT = 64
_ENTRY = struct.Struct("<QQ")  # offset, size
_TRAILER = struct.Struct("<QQ")  # size of the stream, number of buffers


def create(name: str) -> int:
    """An empty memfd, to be filled by ``write``. Closed on exec."""
    return os.memfd_create(f"mlaunch-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write(fd: int, value: object) -> int:
    """Replaces what the memfd holds by ``value``; returns the size in bytes.

    Raises what pickling the value raises (``explain.unpicklable`` finds the culprit).
    """
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    kept: list[pickle.PickleBuffer] = []
    alive: list[object] = []
    with open(fd, "wb", closefd=False) as file:
        _dump(file, value, kept, alive)
        stream_size = file.tell()
        table = bytearray()
        for buffer in kept:
            with buffer.raw() as raw:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                table += _ENTRY.pack(file.tell(), raw.nbytes)
                file.write(raw)
        file.write(table + _TRAILER.pack(stream_size, len(kept)))
        return file.tell()


def _dump(file: Any, value: object, kept: list[pickle.PickleBuffer], alive: list[object]) -> None:
    def stays_in_band(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if view.nbytes < _OUT_OF_BAND:
                return True
        kept.append(buffer)
        return False

    # Pickler reads its table when it is made, so the table must belong to a class.
    table = ChainMap(tensors.reducers(alive), cloudpickle.Pickler.dispatch_table)
    pickler = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table})
    pickler(file, protocol=5, buffer_callback=stays_in_band).dump(value)


def check(value: object) -> None:
    """Raises what pickling ``value`` raises, keeping nothing of it."""
    with open(os.devnull, "wb") as sink:
        _dump(sink, value, [], [])


def read(fd: int) -> Any:
    """The value in a memfd. The caller may close ``fd``: arrays and tensors hold the mapping."""
    size = os.fstat(fd).st_size
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    stream_size, count = _TRAILER.unpack_from(view, size - _TRAILER.size)
    table = view[size - _TRAILER.size - count * _ENTRY.size : size - _TRAILER.size]
    buffers = [view[offset : offset + length] for offset, length in _ENTRY.iter_unpack(table)]
    return pickle.loads(view[:stream_size], buffers=buffers)
