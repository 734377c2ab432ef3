"""Many streams on one connection: nothing is lost, mixed up or kept without bound, and one that ends ends alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from mlaunch.rendezvous import streams
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_keys import StoreKeys
from mlaunch.rendezvous.streams import RankStreams, serve_store

VALIDATE = b"\0\xce\xf7\x85\x3c"
LARGE = 32 << 20


async def until(condition: Callable[[], object]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), 60)


@contextlib.asynccontextmanager
async def link() -> AsyncIterator[tuple[RankStreams, int, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A link's streams; yields also where its ranks connect, and the gate's side of its connection."""
    near, far = socket.socketpair()
    carried, listener = RankStreams(), listen()
    task = asyncio.ensure_future(carried.serve(listener, await asyncio.open_connection(sock=near)))
    reader, writer = await asyncio.open_connection(sock=far)
    try:
        yield carried, listener.getsockname()[1], reader, writer
    finally:
        writer.close()
        await asyncio.wait_for(asyncio.wait([task]), 60)


async def rank(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(LOOPBACK, port)


def test_a_rank_waits_while_the_gate_does_not_read() -> None:
    """Its machine's link keeps little of what it says meanwhile; all of it comes in the end."""

    async def flood() -> tuple[int, int]:
        async with link() as (carried, port, reader, writer):
            _, flooding = await rank(port)
            flooding.write(bytes(LARGE))
            await until(lambda: carried._resuming)
            assert carried._pieces is not None
            kept = carried._pieces.unsent
            pieces, came = streams._Pieces(reader, writer), 0
            async for stream, data in pieces.received():
                assert stream == 0
                came += len(data)
                if came == LARGE:
                    break
            flooding.close()
            return kept, came

    kept, came = asyncio.run(flood())
    assert came == LARGE
    assert kept < 2 * streams._AHEAD


def test_streams_are_numbered_as_they_first_speak() -> None:
    async def speak() -> list[tuple[int, bytes]]:
        async with link() as (carried, port, reader, writer):
            ends = []
            for number in range(3):
                ends.append(await rank(port))
                await until(lambda number=number: len(carried._connected) == number + 1)  # type: ignore[misc]
            heard, pieces = [], streams._Pieces(reader, writer).received()
            for number in (2, 0, 1):
                ends[number][1].write(b"%d" % number)
                heard.append(await asyncio.wait_for(anext(pieces), 60))
            ends[0][1].close()
            heard.append(await asyncio.wait_for(anext(pieces), 60))
            for _, end in ends:
                end.close()
            return heard

    assert asyncio.run(speak()) == [(0, b"2"), (1, b"0"), (2, b"1"), (1, b"")]


def test_nothing_is_kept_of_ranks_that_have_left() -> None:
    async def come_and_leave() -> None:
        async with link() as (carried, port, _, __):
            ends = [await rank(port) for _ in range(20)]
            for _, end in ends:
                end.write(b"x")
            await until(lambda: len(carried._ends) == 20)
            for _, end in ends:
                end.close()
            await until(lambda: not carried._ends and not carried._connected)

    asyncio.run(come_and_leave())


def test_ranks_lose_their_connections_with_the_gate() -> None:
    async def lose() -> bytes:
        async with link() as (carried, port, _, writer):
            reader, end = await rank(port)
            await until(lambda: carried._connected)
            writer.close()
            said = await asyncio.wait_for(reader.read(), 60)
            end.close()
            return said

    assert asyncio.run(lose()) == b""


@contextlib.asynccontextmanager
async def store() -> AsyncIterator[tuple[StoreKeys, asyncio.StreamReader, asyncio.StreamWriter]]:
    """The gate's side of one machine; yields the link's side."""
    near, far = socket.socketpair()
    keys = StoreKeys()
    task = asyncio.ensure_future(serve_store(keys, *await asyncio.open_connection(sock=near)))
    reader, writer = await asyncio.open_connection(sock=far)
    try:
        yield keys, reader, writer
    finally:
        writer.close()
        await asyncio.wait_for(asyncio.wait([task]), 60)


def piece(stream: int, data: bytes) -> bytes:
    return streams._HEAD.pack(stream, len(data)) + data


@pytest.mark.parametrize("seed", range(20))
def test_pieces_may_come_in_any_cut(seed: int) -> None:
    chance = random.Random(seed)
    said = [piece(stream, VALIDATE + b"\x0d" + stream.to_bytes(4, "little")) for stream in range(20)]
    data = b"".join(said)

    async def speak() -> list[tuple[int, bytes]]:
        async with store() as (_, reader, writer):
            at = 0
            while at < len(data):
                size = chance.randrange(1, 60)
                writer.write(data[at : at + size])
                await writer.drain()
                at += size
            answers = streams._Pieces(reader, writer).received()
            return [await asyncio.wait_for(anext(answers), 60) for _ in said]

    assert asyncio.run(speak()) == [(stream, stream.to_bytes(4, "little")) for stream in range(20)]


def test_a_stream_that_was_ended_says_no_more() -> None:
    """What its client had sent by then changes nothing, and the other streams go on."""

    async def speak() -> list[tuple[int, bytes]]:
        async with store() as (keys, reader, writer):
            writer.write(piece(0, b"nonsense") + piece(0, VALIDATE) + piece(0, b"\x01"))
            writer.write(piece(1, VALIDATE + b"\x0d\1\0\0\0"))
            answers = streams._Pieces(reader, writer).received()
            heard = [await asyncio.wait_for(anext(answers), 60) for _ in range(2)]
            assert keys.count() == 0
            return heard

    assert asyncio.run(speak()) == [(0, b""), (1, b"\1\0\0\0")]


def test_what_a_machine_waited_for_is_forgotten_with_it() -> None:
    async def come_and_leave() -> StoreKeys:
        async with store() as (keys, reader, writer):
            wait = b"\x06" + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"x"
            writer.write(piece(0, VALIDATE + wait) + piece(1, VALIDATE + b"\x0d\1\0\0\0"))
            await asyncio.wait_for(anext(streams._Pieces(reader, writer).received()), 60)
            assert keys._waits
        return keys

    assert not asyncio.run(come_and_leave())._waits


def test_a_piece_that_is_too_large_ends_the_connection() -> None:
    async def speak() -> None:
        near, far = socket.socketpair()
        far.send(streams._HEAD.pack(0, streams._PIECE + 1))
        reader, writer = await asyncio.open_connection(sock=near)
        with far, contextlib.closing(writer), pytest.raises(ConnectionError, match="no piece of a stream"):
            await asyncio.wait_for(serve_store(StoreKeys(), reader, writer), 60)

    asyncio.run(speak())
