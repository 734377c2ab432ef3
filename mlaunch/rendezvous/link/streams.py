"""The link's side of its ranks' traffic with the store: each rank's connection is a stream to the gate, and back.

What a rank says is passed on as it comes, but for what its link knows by itself: that a client of torch's store is
there, and that it waits for all others.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from mlaunch.rendezvous import control_protocol
from mlaunch.rendezvous.gate import torch_protocol
from mlaunch.rendezvous.gate.membership import MOST
from mlaunch.rendezvous.gate.torch_protocol import Asked, Request
from mlaunch.rendezvous.link.meetings import Meetings
from mlaunch.rendezvous.link.store_split import Splitter, marks
from mlaunch.rendezvous.multiplex import MACHINE, Pieces
from mlaunch.rendezvous.peer_user import PeerUser

COMING, PASSED = struct.Struct("<QQQ"), struct.Struct("<Q")  # a meeting's number, how many came, how many are to come
_MARKS_DELAY = 1.0  # seconds for the other ranks of a machine to leave theirs
# As memory of this process, for all ranks together: a gate that is slow slows down who writes, and fills nothing.
_AHEAD = 1 << 22  # bytes that may wait to be sent before the ranks' connections are not read any more
_BACKLOG = 4096


class RankStreams:
    """Carries what its ranks say to the gate.

    They connect to a listening socket, before or after there is a connection to the gate; processes of other users are
    turned away. ``ranks``, ``world_size``: how many there are on this machine, and in all.
    """

    def __init__(self, ranks: int, world_size: int) -> None:
        self._ends: dict[int, asyncio.Transport] = {}  # by their streams' numbers
        self._connected: set[asyncio.Transport] = set()
        self._begun = 0
        self._pieces: Pieces | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._marks: dict[bytes, list[bytes]] = {}  # by key, of ranks that have come; to be told
        self._telling = -1  # the stream for that, once there is one
        self.meetings = Meetings(ranks, world_size, self._tell)

    async def serve(self, listener: socket.socket, streams: control_protocol.Streams) -> None:
        """Carries until the gate's side ends it, and with it all ranks' connections."""
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
                elif stream == MACHINE:
                    self.meetings.passed(*_unpacked(data))
        finally:
            server.close()
            users.close()
            for end in self._connected:
                end.close()

    def connect(self, end: asyncio.Transport) -> None:
        """Takes in a rank's connection."""
        self._connected.add(end)
        # A newcomer would be read while all others are held back.
        if self._resuming is not None:
            end.pause_reading()

    def begin(self, end: asyncio.Transport) -> int:
        """Returns the number of the stream of a connection that has something for the store."""
        # A rank that only pings or meets has none: the gate hears of nobody who has nothing to say to it.
        stream = self._number()
        self._ends[stream] = end
        return stream

    def _number(self) -> int:
        """Returns the number of a stream that is the next to say something."""
        self._begun += 1
        return self._begun - 1

    def say(self, stream: int, data: bytes) -> None:
        """Sends what a rank has said; b"": that it is gone."""
        if self._pieces is None:
            return
        # First: who asks for the marks must find those of ranks that had come before the question.
        if self._marks:
            self._tell_marks()
        self._pieces.send(stream, data)
        if self._pieces.unsent > _AHEAD and self._resuming is None:
            for end in self._connected:
                end.pause_reading()
            self._resuming = asyncio.ensure_future(self._resume(self._pieces))

    def mark(self, key: bytes, value: bytes) -> None:
        """Takes in that a rank has come. The marks of a machine's ranks go out together, before anything else."""
        if not self._marks:
            asyncio.get_running_loop().call_later(_MARKS_DELAY, self._tell_marks)
        # A mark may be seen late: it is read when somebody has waited in vain for the launch's whole timeout. Told
        # one by one, the marks of 8,192 ranks took the gate 0.1 s more.
        if self._telling < 0:
            self._telling = self._number()
        self._marks.setdefault(key, []).append(value)

    def _tell_marks(self) -> None:
        collected, self._marks = self._marks, {}
        for key, left in collected.items():
            self.say(self._telling, marks(key, left))

    def _tell(self, number: int, count: int, size: int, key: bytes) -> None:
        self.say(MACHINE, COMING.pack(number, count, size) + key)

    async def _resume(self, pieces: Pieces) -> None:
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


def _unpacked(word: bytes) -> tuple[int]:
    """Returns the number of a meeting that all have come to. ConnectionError for what no gate says."""
    if len(word) != PASSED.size:
        raise ConnectionError("what came is no word of the gate")
    return PASSED.unpack(word)


class _RankEnd(asyncio.Protocol):
    """One connection of a rank."""

    def __init__(self, streams: RankStreams, users: PeerUser) -> None:
        self._streams = streams
        self._users = users
        self._stream: int | None = None
        self._splitter = Splitter()
        self._greeted = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        # torch's clients know no password, and everybody on the machine reaches a port on loopback.
        if self._users.is_ours(transport.get_extra_info("socket")):
            self._streams.connect(transport)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for part in self._splitter.feed(data):
                self._take(part)
        except ValueError:
            self._transport.close()

    def _take(self, part: bytes | Request) -> None:
        """Does what a rank says. ValueError for what no client of torch's says."""
        if not self._greeted:
            self._greeted = torch_protocol.greets(part)
        elif not isinstance(part, Request):
            self._pass_on(part)
        elif part.asked is Asked.PING:
            self._transport.write(torch_protocol.pong(part))
        elif part.asked is Asked.MEET:
            size = torch_protocol.bounded(part.number, MOST, least=1)
            self._streams.meetings.come(self, part.strings[0], size, self._go)
        elif part.asked is Asked.APPEND:
            self._streams.mark(*part.strings)
        elif self._streams.meetings.leave(self):
            self._transport.write(torch_protocol.GIVEN_UP)
        else:
            self._pass_on(torch_protocol.GIVE_UP)

    def _pass_on(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._streams.begin(self._transport)
        self._streams.say(self._stream, data)

    def _go(self) -> None:
        self._transport.write(torch_protocol.GO)

    def connection_lost(self, _: Exception | None) -> None:
        self._streams.meetings.leave(self)
        self._streams.disconnect(self._transport, self._stream)
