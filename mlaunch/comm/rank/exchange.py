"""Objects between ranks: any picklable value, of any size, over the CPU.

torch's own collectives for objects pad each rank's bytes to the largest size, so one large object among small ones
costs its size times the number of ranks squared. Here each rank's bytes are sent at their own size::

    sizes of all | blobs: seal, table, pickle stream, small buffers | large buffers, straight from their memory

No part of a blob is used before its seal is checked. Large buffers are plain bytes, which are never executed: they are
not sealed, so that no tensor is read once more.

If a value cannot be pickled, its size says so to all ranks: all raise, and none waits.
"""

from __future__ import annotations

import functools
import hmac
import io
import mmap
import pickle
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mlaunch.comm.rank import world
from mlaunch.protocol import explain, this_rank
from mlaunch.protocol.pickling import pickle_by_name
from mlaunch.torch_parts import process_groups

_SEAL_SIZE = 32  # bytes that a blob begins with
_LARGE = 1024 * 1024  # bytes from which a buffer is sent by itself
# One step for all: each broadcast waits for its root, so small objects of many ranks would take as many turns.
_PADDED = 64 * 1024  # bytes up to which blobs are gathered in one step, padded
_CHUNK = 256 * 1024 * 1024  # bytes per operation
_FAILED = -1  # instead of a size
_COUNT = struct.Struct("<QQ")  # size of the stream, number of buffers
_SIZE = struct.Struct("<Q")

_gloo_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def cpu_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group`` if it can carry CPU tensors, else a gloo group of the same ranks, made at the first use.

    Collective for the group's ranks. ``None``: all ranks.
    """
    group = group or world.group()
    if "cpu:" in dist.get_backend_config(group):
        return group
    # Kept: to form a group takes a round of all its ranks through the store.
    if group not in _gloo_twins:
        ranks = dist.get_process_group_ranks(group)
        # NCCL carries no CPU tensors, and an object would have to go by way of the device.
        _gloo_twins[group] = world.subgroup(ranks, "gloo")
    return _gloo_twins[group]


def gather_everywhere(value: object, group: dist.ProcessGroup | None, what: str) -> list[Any]:
    """Return every rank's value, on every rank. A rank's own value is the object itself."""
    link = _Link(cpu_group(group))
    mine, sizes = _prepare(value, link, what)
    if max(sizes) <= _PADDED:
        blobs = link.gather_padded(mine.blob, sizes)
    else:
        blobs = [link.broadcast(mine.blob if link.rank == i else _room(size), i) for i, size in enumerate(sizes)]
    values = []
    for i, blob in enumerate(blobs):
        share = functools.partial(link.broadcast, src=i)
        if link.rank == i:
            mine.send(share)
            values.append(value)
        else:
            values.append(_unpack(link.checked(blob, i, what), share))
    return values


def gather_at(value: object, dst: int, group: dist.ProcessGroup | None, what: str) -> list[Any]:
    """Return every rank's value at rank ``dst`` of the group, [] elsewhere."""
    link = _Link(cpu_group(group))
    mine, sizes = _prepare(value, link, what)
    if link.rank != dst:
        link.send(mine.blob, dst)
        mine.send(functools.partial(link.send, dst=dst))
        return []
    values = []
    for i, size in enumerate(sizes):
        if i == dst:
            values.append(value)
            continue
        receive = functools.partial(link.receive, src=i)
        values.append(_unpack(link.checked(receive(_room(size)), i, what), receive))
    return values


def broadcast(value: object, src: int, group: dist.ProcessGroup | None, what: str) -> Any:
    """Return the value of rank ``src`` of the group, on every rank. On that rank it is the object itself."""
    link = _Link(cpu_group(group))
    packed = _pack(value) if link.rank == src else _Packed()
    size = _size_tensor(packed)
    link.broadcast_tensor(size, src)
    _raise_if_unpicklable([0] * src + [int(size)], packed, link, what)
    share = functools.partial(link.broadcast, src=src)
    if link.rank == src:
        link.seal.put(packed.blob, src)
        share(packed.blob)
        packed.send(share)
        return value
    return _unpack(link.checked(share(_room(int(size))), src, what), share)


@dataclass
class _Packed:
    """A value ready to be sent. ``error``: the exception from its pickling, with the name of the culprit."""

    blob: bytearray = field(default_factory=bytearray)
    large: list[pickle.PickleBuffer] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)  # what the large buffers point into
    error: Exception | None = None
    culprit: str = ""

    def send(self, send: Callable[[Any], object]) -> None:
        """Send the large buffers."""
        for buffer in self.large:
            with buffer.raw() as raw:
                # torch.frombuffer does not accept read-only memory.
                send(bytearray(raw) if raw.readonly else raw)


def _pack(value: object) -> _Packed:
    file = io.BytesIO()
    try:
        parts = pickle_by_name(file, value)
    except Exception as error:  # whatever a __reduce__ may raise
        return _Packed(error=error, culprit=explain.unpicklable(value, "it"))
    raws = [buffer.raw() for buffer in parts.buffers]
    blob = bytearray(_SEAL_SIZE) + _COUNT.pack(file.tell(), len(raws))
    blob += b"".join(_SIZE.pack(raw.nbytes) for raw in raws)
    blob += file.getbuffer()
    for raw in raws:
        if raw.nbytes < _LARGE:
            blob += raw
    large = [buffer for buffer, raw in zip(parts.buffers, raws, strict=True) if raw.nbytes >= _LARGE]
    return _Packed(blob, large, parts.alive)


def _room(size: int) -> Any:
    """Make a writable buffer; a large one without the time to fill it with zeros first."""
    return bytearray(size) if size < _LARGE else mmap.mmap(-1, size)


def _unpack(blob: Any, receive: Callable[[Any], Any]) -> Any:
    view = memoryview(blob)
    stream_size, count = _COUNT.unpack_from(view, _SEAL_SIZE)
    start = _SEAL_SIZE + _COUNT.size
    sizes = [size for (size,) in _SIZE.iter_unpack(view[start : start + count * _SIZE.size])]
    start += count * _SIZE.size
    stream, at = view[start : start + stream_size], start + stream_size
    buffers: list[Any] = []
    for size in sizes:
        if size >= _LARGE:
            buffers.append(receive(_room(size)))
        else:
            buffers.append(view[at : at + size])
            at += size
    return pickle.loads(stream, buffers=buffers)


def _prepare(value: object, link: _Link, what: str) -> tuple[_Packed, list[int]]:
    mine = _pack(value)
    gathered = torch.empty(link.size, dtype=torch.int64)
    dist.all_gather(list(gathered.view(link.size, 1)), _size_tensor(mine), group=link.group)
    sizes: list[int] = gathered.tolist()
    # After the sizes, which say so to everybody: a rank that raised alone would leave the others waiting.
    _raise_if_unpicklable(sizes, mine, link, what)
    link.seal.put(mine.blob, link.rank)
    return mine, sizes


def _size_tensor(packed: _Packed) -> torch.Tensor:
    return torch.tensor([_FAILED if packed.error else len(packed.blob)], dtype=torch.int64)


def _raise_if_unpicklable(sizes: list[int], mine: _Packed, link: _Link, what: str) -> None:
    failed = [link.rank_of(i) for i, size in enumerate(sizes) if size == _FAILED]
    if mine.error is not None:
        raise TypeError(
            f"{what}: what this rank passed cannot be pickled: {mine.culprit} ({mine.error})"
        ) from mine.error
    if failed:
        raise TypeError(f"{what}: rank {failed[0]} passed a value that cannot be pickled (its own error names it)")


class _Link:
    """A CPU group, with ranks counted within it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.seal = Seal(group)

    def rank_of(self, index: int) -> int:
        return dist.get_global_rank(self.group, index)

    def checked(self, blob: Any, index: int, what: str) -> Any:
        """Return a blob that this rank of the group has sent for this exchange. ValueError for any other."""
        if not self.seal.holds(blob, index):
            raise ValueError(
                f"{what}: what came as rank {self.rank_of(index)}'s was not sent by that rank for this call, so "
                f"nothing of it was unpickled. Either the ranks are in different calls of mlaunch.comm, or another "
                f"process that reaches their ports has put itself between them (see SECURITY.rst)"
            )
        return blob

    def gather_padded(self, blob: bytearray, sizes: list[int]) -> list[Any]:
        longest = max(sizes)
        padded = torch.frombuffer(blob + bytes(longest - len(blob)), dtype=torch.uint8)
        everything = bytearray(self.size * longest)
        places = torch.frombuffer(everything, dtype=torch.uint8).view(self.size, longest)
        dist.all_gather(list(places), padded, group=self.group)
        return [everything[i * longest : i * longest + size] for i, size in enumerate(sizes)]

    def broadcast_tensor(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, self.rank_of(src), group=self.group)

    def broadcast(self, buffer: Any, src: int) -> Any:
        for chunk in _chunks(buffer):
            self.broadcast_tensor(chunk, src)
        return buffer

    def send(self, buffer: Any, dst: int) -> None:
        for chunk in _chunks(buffer):
            dist.send(chunk, self.rank_of(dst), group=self.group)

    def receive(self, buffer: Any, src: int) -> Any:
        for chunk in _chunks(buffer):
            dist.recv(chunk, self.rank_of(src), group=self.group)
        return buffer


def _chunks(buffer: Any) -> Iterator[torch.Tensor]:
    """Yield the buffer as tensors that share its memory."""
    whole = memoryview(buffer).cast("B")
    for start in range(0, whole.nbytes, _CHUNK):
        yield torch.frombuffer(whole[start : start + _CHUNK], dtype=torch.uint8)


@dataclass
class _Count:
    """The exchanges of one group since the call began, which every member begins in the same order."""

    group: bytes  # its name, its members, and which of those with both it is in this call
    call: int
    exchanges: int = 0


@dataclass
class _GroupNumbers:
    """How many groups of a description there were in a call; the same in all members, which make them in one order."""

    call: int = -1
    of: Counter[bytes] = field(default_factory=Counter)


_numbers = _GroupNumbers()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Count] = weakref.WeakKeyDictionary()


class Seal:
    """The seal (a MAC) of the next exchange of a group, made with the launch's secret.

    Ranks find each other through a store that other users of their machines may reach, so anybody may be at the other
    end of a connection. The seal holds for one rank's object in one exchange of one group: what was sent before, by
    somebody else, or in another group is refused like what was never sent, and not unpickled.

    Ranks of other launchers share no secret. What they exchange is checked only against accidents.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        me, call = this_rank.this_rank, this_rank.call
        self._secret = (me.secret if me is not None else "").encode()
        count = _counts.get(group)
        if count is None or count.call != call:  # one that was broken off may have left members with different counts
            count = _counts[group] = _Count(_numbered_group(_describe_group(group), call), call)
        count.exchanges += 1
        # Group, call and number: what was sent before, or elsewhere, bears another code.
        self._place = b"mlaunch object\0%d\0%d\0%b\0" % (call, count.exchanges, count.group)

    def put(self, blob: bytearray, source: int) -> None:
        """Write the code into the blob's first bytes. ``source``: the rank within the group that sends it."""
        blob[:_SEAL_SIZE] = self._code(memoryview(blob), source)

    def holds(self, blob: Any, source: int) -> bool:
        """True if that rank of the group has sent these bytes, in this exchange."""
        view = memoryview(blob)
        return hmac.compare_digest(bytes(view[:_SEAL_SIZE]), self._code(view, source))

    def _code(self, view: memoryview, source: int) -> bytes:
        code = hmac.new(self._secret, self._place + b"%d\0" % source, "sha256")
        code.update(view[_SEAL_SIZE:])
        return code.digest()


def _numbered_group(group: bytes, call: int) -> bytes:
    """Return a name that no group of this call has had: a default group that is made again has the name of the last."""
    if _numbers.call != call:
        _numbers.call, _numbers.of = call, Counter()
    _numbers.of[group] += 1
    return b"%b\0%d" % (group, _numbers.of[group])


def _describe_group(group: dist.ProcessGroup) -> bytes:
    ranks = dist.get_process_group_ranks(group)
    return f"{process_groups.name_of(group)}\0{','.join(map(str, ranks))}".encode()
