"""The gate's side of a machine's traffic with the store: a session for each of its ranks, and one for all together."""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable

from mlaunch.rendezvous.gate.store_connection import StoreConnection
from mlaunch.rendezvous.gate.store_keys import StoreKeys, Wait
from mlaunch.rendezvous.link.streams import COMING, PASSED
from mlaunch.rendezvous.multiplex import MACHINE, Pieces


async def serve_store(keys: StoreKeys, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves a machine's ranks the store, until the machine is gone. ConnectionError for what no link says."""
    pieces = Pieces(reader, writer)
    sessions: dict[int, StoreConnection] = {}
    machine = _Machine(keys, pieces)
    begun = 0
    try:
        async for stream, data in pieces.received():
            if stream == MACHINE:
                machine.take(data)
                continue
            # Only the next number begins a stream: one that was ended must not come to life by what was still on its
            # way.
            if stream == begun:
                begun += 1
                sessions[stream] = StoreConnection(keys, _answering(pieces, stream))
            _feed(sessions, stream, data, pieces)
            if pieces.unsent:
                await pieces.drained()  # a machine that does not read is not listened to
    finally:
        machine.close()
        for session in sessions.values():
            session.close()


class _Machine:
    """The meetings to which ranks of one machine have come."""

    def __init__(self, keys: StoreKeys, pieces: Pieces) -> None:
        self._keys = keys
        self._pieces = pieces
        self._waits: dict[int, Wait] = {}

    def take(self, data: bytes) -> None:
        """Takes in how many have come to one."""
        try:
            number, count, size = COMING.unpack_from(data)
            key = data[COMING.size :]
            wait = self._keys.meet(key, size, functools.partial(self._go, number), count)
        except (struct.error, ValueError, LookupError) as error:
            raise ConnectionError("what came is no word of a machine") from error
        if wait is not None:
            self._waits[number] = wait

    def close(self) -> None:
        """Is called when the machine is gone."""
        for wait in self._waits.values():
            self._keys.give_up(wait)

    def _go(self, number: int) -> None:
        self._waits.pop(number, None)
        self._pieces.send(MACHINE, PASSED.pack(number))


def _feed(sessions: dict[int, StoreConnection], stream: int, data: bytes, pieces: Pieces) -> None:
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


def _answering(pieces: Pieces, stream: int) -> Callable[[bytes], None]:
    return lambda data: pieces.send(stream, data)
