"""The gate's side of a machine's traffic with the store: a session for each of its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlaunch.machines.wire.multiplex import Pieces
from mlaunch.rendezvous.store_connection import StoreConnection
from mlaunch.rendezvous.store_keys import StoreFullError, StoreKeys


async def serve_store(
    keys: StoreKeys,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    tell_full: Callable[[], None] = lambda: None,
) -> None:
    """Serves a machine's ranks the store, until the machine is gone. ConnectionError for what no link says.

    ``tell_full`` is called when the store has no room for what one of them asks.
    """
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
            if _feed(sessions, stream, data, pieces):
                tell_full()
            if pieces.unsent:
                await pieces.drained()  # a machine that does not read is not listened to
    finally:
        for session in sessions.values():
            session.close()


def _feed(sessions: dict[int, StoreConnection], stream: int, data: bytes, pieces: Pieces) -> bool:
    """Passes on what came of a stream; ends one whose client asks for what cannot be. True: for want of room."""
    session, is_full = sessions.get(stream), False
    if session is None:  # it was ended
        return False
    try:
        session.feed(data)
    except (ValueError, LookupError) as error:
        pieces.send(stream, b"")
        data, is_full = b"", isinstance(error, StoreFullError)
    if not data:
        sessions.pop(stream).close()
    return is_full


def _answering(pieces: Pieces, stream: int) -> Callable[[bytes], None]:
    return lambda data: pieces.send(stream, data)
