"""Values of ranks on their way between machines, for ``gather="all"``.

A value is a memfd; it travels as a header line, its bytes in pieces, and a line with its signature. Every machine puts
its ranks' values at the gate, and gets the others' there once all are in. Whoever gets one checks, before anything is
unpickled, that someone who knows the token signed these very bytes for this rank of this launch. No more than a piece
of a value is in a process's own memory.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable

from mlaunch.base.fds import memory_file
from mlaunch.rendezvous import control_protocol

_PIECE = 1024 * 1024  # bytes
_LONGEST = 1 << 46  # bytes of a value: no machine has as many
_NONE = -1  # the size of what a rank did not return


class Signature:
    """Of one value, over what is known of it and its bytes as they pass."""

    def __init__(self, token: str, launch_id: str, rank: int) -> None:
        self._digest = hmac.new(token.encode(), f"mlaunch value\0{launch_id}\0{rank}\0".encode(), "sha256")

    def add(self, piece: bytes) -> bytes:
        self._digest.update(piece)
        return piece

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


async def send(writer: asyncio.StreamWriter, rank: int, fd: int | None, signature: Signature | str) -> None:
    """Sends a rank's value; ``fd`` None: it returned nothing. ``signature``: to be made on the way, or as it came."""
    size = _NONE if fd is None else os.fstat(fd).st_size
    await control_protocol.send(writer, {"rank": rank, "size": size})
    if fd is not None:
        for start in range(0, size, _PIECE):
            piece = os.pread(fd, _PIECE, start)
            writer.write(signature.add(piece) if isinstance(signature, Signature) else piece)
            await writer.drain()
    await control_protocol.send(
        writer, {"signature": signature if isinstance(signature, str) else signature.hexdigest()}
    )


async def receive(
    reader: asyncio.StreamReader, token: str, launch_id: str, world_size: int
) -> tuple[int, int | None, str]:
    """Returns rank, memfd (None: it returned nothing), signature. ConnectionError unless the signature is right."""
    header = await control_protocol.read(reader)
    rank, size = header.get("rank"), header.get("size")
    if type(rank) is not int or type(size) is not int or not (0 <= rank < world_size and _NONE <= size <= _LONGEST):
        raise ConnectionError("what came is no value")
    signature = Signature(token, launch_id, rank)
    fd = None if size == _NONE else memory_file(f"value-{rank}")
    try:
        left = size
        while fd is not None and left > 0:
            piece = signature.add(await reader.read(min(left, _PIECE)))
            if not piece:
                raise ConnectionError("the connection was closed")
            os.write(fd, piece)
            left -= len(piece)
        trailer = str((await control_protocol.read(reader)).get("signature"))
        if not hmac.compare_digest(trailer, signature.hexdigest()):
            raise ConnectionError(f"the value of rank {rank} has a wrong signature")
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    return rank, fd, trailer


class GatheredValues:
    """What machines have put at the gate. ``complete``: is called once those of all ranks are there."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete
        self._held: dict[object, tuple[int | None, str]] = {}  # rank -> memfd, signature

    async def take(self, reader: asyncio.StreamReader, token: str, launch_id: str, world_size: int) -> None:
        """Takes those of a machine."""
        while not reader.at_eof():
            rank, memfd, signature = await receive(reader, token, launch_id, world_size)
            self._held[rank] = memfd, signature
            if len(self._held) == world_size:
                self._complete()

    async def give(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> None:
        """Gives a machine those that it asks for, until it asks for none, or for nothing for these seconds."""
        while True:
            with control_protocol.limited(reader, patience):
                rank = (await control_protocol.read(reader)).get("rank")
            if type(rank) is not int or rank not in self._held:
                return
            memfd, signature = self._held[rank]
            await send(writer, rank, memfd, signature)
