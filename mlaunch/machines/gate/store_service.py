"""The gate's side of a machine's traffic with the store: a session for each connection of its ranks."""

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
    """Serve the store to a machine's ranks until the machine is gone. ConnectionError for what no link sends.

    ``tell_full`` is called when the store has no room for a rank's request.
    """
    pieces = Pieces(reader, writer)
    sessions: dict[int, StoreConnection] = {}
    begun = 0
    try:
        async for stream, data in pieces.received():
            # Only the next number begins a stream: pieces that were still on their way must not revive a stream that
            # the gate has ended.
            if stream == begun:
                begun += 1
                sessions[stream] = StoreConnection(keys, _answering(pieces, stream))
            if _feed(sessions, stream, data, pieces):
                tell_full()
            if pieces.unsent:
                await pieces.drained()  # the gate reads nothing from a machine that does not read
    finally:
        for session in sessions.values():
            session.close()


def _feed(sessions: dict[int, StoreConnection], stream: int, data: bytes, pieces: Pieces) -> bool:
    """Pass a stream's data to its session, and end a stream whose client asks for the impossible.

    True if the store had no room for it.
    """
    session, is_full = sessions.get(stream), False
    if session is None:  # the gate has ended this stream
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
