"""Many streams on one connection: a machine's link carries all of its ranks' traffic with the store to the gate.

Each piece of a stream comes after its stream's number and its size; one without bytes ends the stream. Numbers count
from 0 in the order in which the streams begin, and none is used twice. What is to be sent
within one turn of the event loop goes out in one write.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

from mlaunch.machines.wire import control_protocol

HEAD = struct.Struct("<QQ")  # stream, size
LONGEST = 1 << 20  # bytes that a piece has at most, so that one side's memory is not what the other says
_READ = 1 << 18  # bytes at a time


class Pieces:
    """One connection, cut into pieces of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def send(self, stream: int, data: bytes) -> None:
        """Sends data, or without any the stream's end, before the loop's next turn."""
        if not self._out:
            # One write for all that a turn of the loop brings, and not a system call for each piece.
            self._loop.call_soon(self._flush)
        for start in range(0, max(1, len(data)), LONGEST):
            piece = data[start : start + LONGEST]
            self._out += HEAD.pack(stream, len(piece)), piece

    def _flush(self) -> None:
        out, self._out = self._out, []
        control_protocol.post(self._writer, b"".join(out))

    @property
    def unsent(self) -> int:
        """Bytes that wait for the other side to read."""
        return self._writer.transport.get_write_buffer_size()

    async def drained(self) -> None:
        await self._writer.drain()

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yields pieces until the connection ends. ConnectionError for what is none."""
        data, at = b"", 0
        while more := await self._reader.read(_READ):
            # Cut once for each read and not for each piece, which would copy the rest as often.
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
