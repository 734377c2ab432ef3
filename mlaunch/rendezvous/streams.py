"""Many streams on one connection: a machine's link carries all of its ranks' traffic with the store to the gate.

Each piece of a stream comes after its stream's number and its size; one without bytes ends the stream. Numbers count
from 0 in the order in which the streams begin, and none is used twice. What is to be sent within one turn of the event
loop goes out in one write.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

from mlaunch.rendezvous import wire
from mlaunch.rendezvous.store_keys import StoreKeys
from mlaunch.rendezvous.store_wire import Session

_HEAD = struct.Struct("<QQ")  # stream, size
_READ = 1 << 18  # bytes at a time
_PIECE = 1 << 20  # bytes that a piece has at most, so that one side's memory is not what the other says
_AHEAD = 1 << 22  # bytes that may wait to be sent before the ranks' connections are not read any more
_BACKLOG = 4096


class _Pieces:
    """One connection, cut into pieces of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def send(self, stream: int, data: bytes) -> None:
        """Sends data, or without any the stream's end, before the loop's next turn."""
        if not self._out:
            self._loop.call_soon(self._flush)
        for start in range(0, max(1, len(data)), _PIECE):
            piece = data[start : start + _PIECE]
            self._out += _HEAD.pack(stream, len(piece)), piece

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not self._writer.is_closing():
            self._writer.write(b"".join(out))

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
            data, at = data[at:] + more, 0
            while len(data) - at >= _HEAD.size:
                stream, size = _HEAD.unpack_from(data, at)
                if size > _PIECE:
                    raise ConnectionError("what came is no piece of a stream")
                start = at + _HEAD.size
                if len(data) - start < size:
                    break
                at = start + size
                yield stream, data[start:at]


class RankStreams:
    """The link's side: what its ranks say goes to the gate, and back.

    They connect to a listening socket, before or after there is a connection to the gate.
    """

    def __init__(self) -> None:
        self._ends: dict[int, asyncio.Transport] = {}  # by their streams' numbers
        self._connected: set[asyncio.Transport] = set()
        self._begun = 0
        self._pieces: _Pieces | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket, streams: wire.Streams) -> None:
        """Carries until the gate's side ends it, and with it all ranks' connections."""
        self._pieces = pieces = _Pieces(*streams)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _RankEnd(self), sock=listener, backlog=_BACKLOG)
        try:
            async for stream, data in pieces.received():
                end = self._ends.get(stream)
                if end is not None and data:
                    end.write(data)
                elif end is not None:
                    end.close()
        finally:
            server.close()
            for end in self._connected:
                end.close()

    def connect(self, end: asyncio.Transport) -> None:
        """Takes in a rank's connection."""
        self._connected.add(end)
        if self._resuming is not None:
            end.pause_reading()

    def begin(self, end: asyncio.Transport) -> int:
        """Returns the number of the stream of a connection that says its first word."""
        stream, self._begun = self._begun, self._begun + 1
        self._ends[stream] = end
        return stream

    def say(self, stream: int, data: bytes) -> None:
        """Sends what a rank has said; b"": that it is gone."""
        if self._pieces is None:
            return
        self._pieces.send(stream, data)
        if self._pieces.unsent > _AHEAD and self._resuming is None:
            for end in self._connected:
                end.pause_reading()
            self._resuming = asyncio.ensure_future(self._resume(self._pieces))

    async def _resume(self, pieces: _Pieces) -> None:
        try:
            await pieces.drained()
        except OSError:  # which ends the ranks' connections
            return
        self._resuming = None
        for end in self._connected:
            end.resume_reading()

    def disconnect(self, end: asyncio.Transport, stream: int | None) -> None:
        """Is called when a rank's connection is closed."""
        self._connected.discard(end)
        if stream is not None:
            self._ends.pop(stream, None)
            self.say(stream, b"")


class _RankEnd(asyncio.Protocol):
    """One connection of a rank."""

    def __init__(self, streams: RankStreams) -> None:
        self._streams = streams
        self._stream: int | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._streams.connect(transport)

    def data_received(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._streams.begin(self._transport)
        self._streams.say(self._stream, data)

    def connection_lost(self, _: Exception | None) -> None:
        self._streams.disconnect(self._transport, self._stream)


async def serve_store(keys: StoreKeys, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Is the gate's side of one machine: serves its ranks the store, until the machine is gone."""
    pieces = _Pieces(reader, writer)
    sessions: dict[int, Session] = {}
    begun = 0
    try:
        async for stream, data in pieces.received():
            if stream == begun:
                begun += 1
                sessions[stream] = Session(keys, _answering(pieces, stream))
            _feed(sessions, stream, data, pieces)
            if pieces.unsent:
                await pieces.drained()  # a machine that does not read is not listened to
    finally:
        for session in sessions.values():
            session.close()


def _feed(sessions: dict[int, Session], stream: int, data: bytes, pieces: _Pieces) -> None:
    """Passes on what came of a stream; ends one whose client asks for what cannot be."""
    session = sessions.get(stream)
    if session is None:  # it was ended
        return
    try:
        session.feed(data)
    except (ValueError, LookupError):
        pieces.send(stream, b"")
        data = b""
    if not data:
        sessions.pop(stream).close()


def _answering(pieces: _Pieces, stream: int) -> Callable[[bytes], None]:
    return lambda data: pieces.send(stream, data)
