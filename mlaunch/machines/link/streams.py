"""The link's side of its ranks' traffic with the store: each rank's connection is a stream to the gate, and back.

The link passes data on as it comes, and keeps no whole value, however large it is.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from mlaunch.machines.wire import control_protocol
from mlaunch.machines.wire.multiplex import Pieces
from mlaunch.rendezvous.peer_user import PeerUser

# For all ranks together. A slow gate slows down the ranks that write, and does not fill this process's memory.
_AHEAD = 1 << 22  # bytes that may wait to be sent before the link stops reading from its ranks
_BACKLOG = 4096


class RankStreams:
    """The streams of one machine's ranks to the gate.

    Ranks connect to a listening socket, before or after there is a connection to the gate. Connections from other
    users' processes are closed.
    """

    def __init__(self) -> None:
        self._ends: dict[int, asyncio.Transport] = {}  # by their streams' numbers
        self._connected: set[asyncio.Transport] = set()
        self._begun = 0
        self._pieces: Pieces | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket, streams: control_protocol.Streams) -> None:
        """Carry data both ways until the gate's side ends the connection; then close all ranks' connections."""
        self._pieces = pieces = Pieces(*streams)
        loop = asyncio.get_running_loop()
        users = PeerUser()
        server = await loop.create_server(lambda: _RankEnd(self, users), sock=listener, backlog=_BACKLOG)
        try:
            async for stream, data in pieces.received():
                end = self._ends.get(stream)
                if end is not None and data:
                    end.write(data)
                elif end is not None:
                    end.close()
        finally:
            server.close()
            users.close()
            for end in self._connected:
                end.close()

    def connect(self, end: asyncio.Transport) -> None:
        """Add a rank's new connection."""
        self._connected.add(end)
        # Else the link would read from it, while all others wait for the gate.
        if self._resuming is not None:
            end.pause_reading()

    def begin(self, end: asyncio.Transport) -> int:
        """Begin the stream of a connection whose first data has come, and return the stream's number."""
        stream, self._begun = self._begun, self._begun + 1
        self._ends[stream] = end
        return stream

    def say(self, stream: int, data: bytes) -> None:
        """Send a rank's data to the gate; b"" says that its connection is closed."""
        if self._pieces is None:
            return
        self._pieces.send(stream, data)
        if self._pieces.unsent > _AHEAD and self._resuming is None:
            for end in self._connected:
                end.pause_reading()
            self._resuming = asyncio.ensure_future(self._resume(self._pieces))

    async def _resume(self, pieces: Pieces) -> None:
        try:
            await pieces.drained()
        except OSError:  # serve() closes the ranks' connections
            return
        self._resuming = None
        for end in self._connected:
            end.resume_reading()

    def disconnect(self, end: asyncio.Transport, stream: int | None) -> None:
        """Remove a rank's closed connection, and tell the gate if it had a stream."""
        self._connected.discard(end)
        if stream is not None:
            self._ends.pop(stream, None)
            self.say(stream, b"")


class _RankEnd(asyncio.Protocol):
    """One connection of a rank."""

    def __init__(self, streams: RankStreams, users: PeerUser) -> None:
        self._streams = streams
        self._users = users
        self._stream: int | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        # torch's clients know no password, and any user of the machine can connect to a port on loopback.
        if self._users.is_ours(transport.get_extra_info("socket")):
            self._streams.connect(transport)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._streams.begin(self._transport)
        self._streams.say(self._stream, data)

    def connection_lost(self, _: Exception | None) -> None:
        self._streams.disconnect(self._transport, self._stream)
