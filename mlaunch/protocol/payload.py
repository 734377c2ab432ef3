"""Values in transit: small ones inside their record, others in memfds.

A memfd is written once by the sender and mapped privately by every receiver. It holds::

    pickle stream (protocol 5) | buffer, 64-byte aligned | ... | table of (offset, size) | trailer

Arrays and storages of at least 16 KiB stay out of the stream. A receiver maps the file copy-on-write, so its arrays and
tensors are writable, cost no further copy, and eight ranks that only read share one copy of a large argument.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import field
from typing import Any, BinaryIO

from mlaunch.base.fds import KeptFd, fix_size, memory_file
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import RemoteError
from mlaunch.protocol.pickling import OUT_OF_BAND, Parts, Sink, pickle_by_name, pickle_by_value

# As torch aligns tensors: vector instructions want it, and a cache line is as long.
_ALIGNMENT = 64
_ENTRY = struct.Struct("<QQ")  # offset, size
PLAIN = frozenset({type(None), bool, int, float, str, bytes})  # they are the same in each process
_PICKLED_AS_IT_IS = PLAIN | {RemoteError}
_TRAILER = struct.Struct("<QQ")  # size of the stream, number of buffers


@frozen_record
class Payload:
    """A pickled value: its bytes if they are few, otherwise the memfd that holds it.

    ``originals``: the objects in it that went by value, which must live here as long as they may come back.
    """

    data: bytes = b""
    memfd: int = -1
    originals: tuple[object, ...] = field(default=(), repr=False, compare=False, kw_only=True)
    _kept: KeptFd | None = field(init=False, compare=False, repr=False)

    def __init__(self, data: bytes = b"", memfd: int = -1, *, originals: tuple[object, ...] = ()) -> None:
        # Written by hand, since each call and value needs one.
        kept = KeptFd(memfd) if memfd >= 0 else None
        self.__dict__.update(data=data, memfd=memfd, originals=originals, _kept=kept)

    @property
    def size(self) -> int:
        """Return its size in bytes."""
        return len(self.data) or os.fstat(self.memfd).st_size

    def fds(self) -> list[int]:
        """Return the descriptors to attach to a record with its data."""
        return [] if self.data else [self.memfd]

    def read(self) -> Any:
        """Return the value. OSError if other code in this process has closed the memfd."""
        if self._kept is not None and not self._kept.intact():
            raise OSError(errno.EBADF, "other code in this process has closed the file that holds the value")
        return pickle.loads(self.data) if self.data else read(self.memfd)

    def parts(self) -> tuple[bytes | memoryview, list[memoryview]]:
        """Return the pickle stream, and the buffers beside it."""
        return (self.data, []) if self.data else parts(self.memfd)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


def pack(value: object, name: str, *, most: int) -> Payload:
    """Pickle a value for ranks; into a new memfd if it takes more than ``most`` bytes."""
    memfd = -1

    def make() -> int:
        nonlocal memfd
        memfd = memory_file(name)
        return memfd

    spool = _Spool(make, most)
    try:
        return Payload(_write(spool, value, pickle_by_value), memfd, originals=tuple(spool.originals))
    except BaseException:
        Payload(memfd=memfd).close()
        raise


def write(fd: int, value: object, *, to_caller: bool = False) -> None:
    """Pickle a value into a memfd, and replace what it holds.

    ``to_caller``: the value goes from a rank to its caller, which has the classes of ``__main__`` that the rank has, so
    they go by name where they can. In the other direction they go by value.

    Raises what pickling the value raises (``explain.unpicklable`` finds the culprit).
    """
    _write(_Spool(lambda: fd, 0), value, pickle_by_name if to_caller else pickle_by_value)


def answer(value: object, memfd: Callable[[], int], *, most: int, to_caller: bool) -> bytes:
    """Return a pickled value, or b"" if it takes more than ``most`` bytes: then it is in a memfd, as from ``write``.

    ``memfd`` returns the memfd, and is called only if it is needed.
    """
    if type(value) in _PICKLED_AS_IT_IS and len(data := pickle.dumps(value, 5)) <= most:
        # Plain values do not need mlaunch's pickler: making one takes longer than pickling them.
        return data
    return _write(_Spool(memfd, most), value, pickle_by_name if to_caller else pickle_by_value)


class _Spool:
    """A buffer for up to ``most`` written bytes; beyond that, all goes into the memfd that ``memfd`` returns."""

    def __init__(self, memfd: Callable[[], int], most: int) -> None:
        self._memfd = memfd
        self._most = most
        self.small = io.BytesIO()
        self.originals: list[object] = []  # among what was written
        self.spilled: BinaryIO | None = None  # the file, once anything is in it

    def write(self, data: Any) -> int:
        if self.spilled is None and self.small.tell() + len(data) <= self._most:
            return self.small.write(data)
        return self.file().write(data)

    def seek(self, place: int) -> int:
        return (self.spilled or self.small).seek(place)

    def truncate(self) -> int:
        return (self.spilled or self.small).truncate()

    def file(self) -> BinaryIO:
        """Return the file, which contains what was written."""
        if self.spilled is None:
            fd = self._memfd()
            # The file may hold an older, longer answer.
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
            self.spilled = open(fd, "wb", closefd=False)  # noqa: SIM115 - the owner of the spool closes it
            self.spilled.write(self.small.getbuffer())
        return self.spilled


def _write(spool: _Spool, value: object, pickle_into: Callable[[Sink, object], Parts]) -> bytes:
    try:
        parts = pickle_into(spool, value)
        spool.originals = parts.originals
        if not parts.buffers and spool.spilled is None:
            return spool.small.getvalue()
        file = spool.file()
        stream_size = file.tell()
        table = bytearray()
        for buffer in parts.buffers:
            with buffer.raw() as raw:
                # With write(): copying into a mapping faults page by page, which is slower.
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                table += _ENTRY.pack(file.tell(), raw.nbytes)
                file.write(raw)
        file.write(table + _TRAILER.pack(stream_size, len(parts.buffers)))
        return b""
    finally:
        if spool.spilled is not None:
            spool.spilled.close()


def check(value: object) -> None:
    """Raise what pickling ``value`` raises, and keep nothing of it."""
    with open(os.devnull, "wb") as sink:
        pickle_by_value(sink, value)


def read(fd: int) -> Any:
    """Return the value in a memfd. The caller may close ``fd``: arrays and tensors hold the mapping."""
    stream, buffers = parts(fd)
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        del stream, buffers  # the traceback of a failure would keep them, and with them the mapping


def parts(fd: int) -> tuple[bytes | memoryview, list[memoryview]]:
    """Return the pickle stream in a memfd, and the buffers beside it."""
    size = os.fstat(fd).st_size
    if size < OUT_OF_BAND:  # it has no buffers, and is not worth a mapping
        return os.pread(fd, size, 0), []
    # Another holder of the descriptor could shrink the file under the mapping, and the kernel would send SIGBUS.
    size = fix_size(fd)
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    stream_size, count = _TRAILER.unpack_from(view, size - _TRAILER.size)
    table = view[size - _TRAILER.size - count * _ENTRY.size : size - _TRAILER.size]
    return view[:stream_size], [view[offset : offset + length] for offset, length in _ENTRY.iter_unpack(table)]
