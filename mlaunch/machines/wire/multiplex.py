"""Many streams on one connection, with which a link carries its ranks' traffic with the store to the gate.

A piece of a stream is the stream's number, the piece's size, and its bytes; a piece without bytes ends the stream.
Numbers count from 0 in the order in which the streams begin, and none is used twice. All pieces that are sent within
one turn of the event loop go out in one write.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

from mlaunch.machines.wire import control_protocol

HEAD = struct.Struct("<QQ")  # stream, size
LONGEST = 1 << 20  # bytes of a piece at most, so that neither side decides how much memory the other needs
_READ = 1 << 18  # bytes at a time


class Pieces:
    """One connection that carries pieces of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def send(self, stream: int, data: bytes) -> None:
        """Send data of a stream, or b"" to end it, in the event loop's next turn."""
        if not self._out:
            # One write for all pieces of a turn of the loop, instead of a system call for each.
            self._loop.call_soon(self._flush)
        for start in range(0, max(1, len(data)), LONGEST):
            piece = data[start : start + LONGEST]
            self._out += HEAD.pack(stream, len(piece)), piece

    def _flush(self) -> None:
        out, self._out = self._out, []
        control_protocol.post(self._writer, b"".join(out))

    @property
    def unsent(self) -> int:
        """How many bytes wait until the other side reads."""
        return self._writer.transport.get_write_buffer_size()

    async def drained(self) -> None:
        await self._writer.drain()

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield each piece's stream and data until the connection ends. ConnectionError if a piece is too large."""
        data, at = b"", 0
        while more := await self._reader.read(_READ):
            # Cut once for each read: a cut for each piece would copy the rest as often.
            data, at = data[at:] + more, 0
            while len(data) - at >= HEAD.size:
                stream, size = HEAD.unpack_from(data, at)
                if size > LONGEST:
                    raise ConnectionError("what came is no piece of a stream")
                start = at + HEAD.size
                if len(data) - start < size:
                    break
                at = start + size
                yield stream, data[start:at]
