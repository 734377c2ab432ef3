"""The gate's side of a machine's traffic with the store: a session for each of its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlaunch.rendezvous.gate.store_connection import StoreConnection
from mlaunch.rendezvous.gate.store_keys import StoreKeys
from mlaunch.rendezvous.multiplex import Pieces


async def serve_store(keys: StoreKeys, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves a machine's ranks the store, until the machine is gone. ConnectionError for what no link says."""
    pieces = Pieces(reader, writer)
    sessions: dict[int, StoreConnection] = {}
    begun = 0
    try:
        async for stream, data in pieces.received():
            # Only the next number begins a stream: one that was ended must not come to life by what was still on its
            # way.
            if stream == begun:
                begun += 1
                sessions[stream] = StoreConnection(keys, _answering(pieces, stream))
            _feed(sessions, stream, data, pieces)
            if pieces.unsent:
                await pieces.drained()  # a machine that does not read is not listened to
    finally:
        for session in sessions.values():
            session.close()


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
