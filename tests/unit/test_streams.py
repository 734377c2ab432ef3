"""Many streams on one connection: nothing is lost, mixed up or kept without bound, and one that ends ends alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from mlaunch.machines import link as machines_link
from mlaunch.machines.gate.gate import serve_store
from mlaunch.machines.link import RankStreams
from mlaunch.machines.wire import control_protocol
from mlaunch.machines.wire.control_protocol import HEAD, Pieces
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_keys import StoreKeys
from mlaunch.rendezvous.store_server import GIVEN_UP, GO, LONGEST, SIZE, Asked

VALIDATE = b"\0\xce\xf7\x85\x3c"


def asking(asked: Asked, *strings: bytes) -> bytes:
    """What a client says that asks for one thing."""
    several = SIZE.pack(len(strings)) if asked in {Asked.WAIT, Asked.MULTI_GET} else b""
    return bytes([asked]) + several + b"".join(SIZE.pack(len(string)) + string for string in strings)


LARGE = asking(Asked.SET, b"key", bytes(LONGEST)) * 8


def meeting(key: bytes, size: int) -> bytes:
    return asking(Asked.MEET, key) + SIZE.pack(size)


def piece(stream: int, data: bytes) -> bytes:
    return HEAD.pack(stream, len(data)) + data


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
    ours = await asyncio.open_connection(sock=near)
    task = asyncio.ensure_future(carried.serve(listener, ours))
    reader, writer = await asyncio.open_connection(sock=far)
    try:
        yield carried, listener.getsockname()[1], reader, writer
    finally:
        writer.close()
        await asyncio.wait_for(asyncio.wait([task]), 60)
        ours[1].close()


async def rank(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(LOOPBACK, port)


def test_a_rank_waits_while_the_gate_does_not_read() -> None:
    """Its machine's link keeps little of what it says meanwhile; all of it comes in the end."""

    async def flood() -> tuple[int, bytes]:
        async with link() as (carried, port, reader, writer):
            _, flooding = await rank(port)
            said = VALIDATE + LARGE
            flooding.write(said)
            await until(lambda: carried._resuming)
            assert carried._pieces is not None
            kept = carried._pieces.unsent
            heard, came = Pieces(reader, writer), bytearray()
            async for stream, data in heard.received():
                assert stream == 0
                came += data
                if len(came) >= len(said):
                    break
            flooding.close()
            return kept, bytes(came)

    kept, came = asyncio.run(flood())
    assert came == VALIDATE + LARGE
    assert kept < 2 * machines_link._AHEAD


def test_streams_are_numbered_as_they_first_speak() -> None:
    async def speak() -> list[tuple[int, bytes]]:
        async with link() as (carried, port, reader, writer):
            ends = []
            for number in range(3):
                ends.append(await rank(port))
                await until(lambda number=number: len(carried._connected) == number + 1)  # type: ignore[misc]
            heard, coming = [], Pieces(reader, writer).received()
            for number in (2, 0, 1):
                ends[number][1].write(VALIDATE + asking(Asked.GET, b"%d" % number))
                heard.append(await asyncio.wait_for(anext(coming), 60))
            ends[0][1].close()
            heard.append(await asyncio.wait_for(anext(coming), 60))
            for _, end in ends:
                end.close()
            return heard

    asked = [(stream, VALIDATE + asking(Asked.GET, b"%d" % number)) for stream, number in enumerate((2, 0, 1))]
    assert asyncio.run(speak()) == [*asked, (1, b"")]


def test_nothing_is_kept_of_ranks_that_have_left() -> None:
    async def come_and_leave() -> None:
        async with link() as (carried, port, _, __):
            ends = [await rank(port) for _ in range(20)]
            for _, end in ends:
                end.write(VALIDATE + asking(Asked.GET, b"x"))
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
    ours = await asyncio.open_connection(sock=near)
    task = asyncio.ensure_future(serve_store(keys, *ours))
    reader, writer = await asyncio.open_connection(sock=far)
    try:
        yield keys, reader, writer
    finally:
        writer.close()
        await asyncio.wait_for(asyncio.wait([task]), 60)
        ours[1].close()


def test_a_stream_that_is_no_torch_client_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    async def come() -> list[tuple[int, bytes]]:
        async with store() as (_, reader, writer):
            nonsense = (b"GET / HTTP/1.1", meeting(b"a", 4), VALIDATE + b"\xff", b"\0\0\0\0\0")
            writer.write(b"".join(piece(stream, said) for stream, said in enumerate(nonsense)))
            answers = Pieces(reader, writer).received()
            return [await next_piece(answers) for _ in nonsense]

    assert asyncio.run(come()) == [(stream, b"") for stream in range(4)]
    assert capfd.readouterr().err == ""  # a log would be theirs to fill


async def next_piece(coming: AsyncIterator[tuple[int, bytes]]) -> tuple[int, bytes]:
    return await asyncio.wait_for(anext(coming), 60)


def test_ranks_of_several_machines_meet() -> None:
    async def meet() -> list[tuple[int, bytes]]:
        async with store() as (keys, reader, writer):
            first, second, third = (piece(stream, VALIDATE + meeting(b"all", 2)) for stream in range(3))
            writer.write(first)
            await until(lambda: len(keys._meetings.get(b"all", ())) == 1)
            writer.write(piece(0, asking(Asked.GIVE_UP)) + second + third)
            coming = Pieces(reader, writer).received()
            return [await next_piece(coming) for _ in range(3)]

    assert asyncio.run(meet()) == [(0, GIVEN_UP), (1, GO), (2, GO)]


def test_a_meeting_is_forgotten_with_its_machine() -> None:
    async def come_and_leave() -> StoreKeys:
        async with store() as (keys, _, writer):
            writer.write(piece(0, VALIDATE + meeting(b"all", 4)))
            await until(lambda: keys._meetings)
        return keys

    assert not asyncio.run(come_and_leave())._meetings


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
            answers = Pieces(reader, writer).received()
            return [await asyncio.wait_for(anext(answers), 60) for _ in said]

    assert asyncio.run(speak()) == [(stream, stream.to_bytes(4, "little")) for stream in range(20)]


def test_a_stream_that_was_ended_says_no_more() -> None:
    """What its client had sent by then changes nothing, and the other streams go on."""

    async def speak() -> list[tuple[int, bytes]]:
        async with store() as (keys, reader, writer):
            writer.write(piece(0, b"nonsense") + piece(0, VALIDATE) + piece(0, b"\x01"))
            writer.write(piece(1, VALIDATE + b"\x0d\1\0\0\0"))
            answers = Pieces(reader, writer).received()
            heard = [await asyncio.wait_for(anext(answers), 60) for _ in range(2)]
            assert keys.count() == 0
            return heard

    assert asyncio.run(speak()) == [(0, b""), (1, b"\1\0\0\0")]


def test_waits_of_a_machine_are_forgotten_with_it() -> None:
    async def come_and_leave() -> StoreKeys:
        async with store() as (keys, reader, writer):
            wait = b"\x06" + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"x"
            writer.write(piece(0, VALIDATE + wait) + piece(1, VALIDATE + b"\x0d\1\0\0\0"))
            await asyncio.wait_for(anext(Pieces(reader, writer).received()), 60)
            assert keys._waits
        return keys

    assert not asyncio.run(come_and_leave())._waits


def test_a_piece_that_is_too_large_ends_the_connection() -> None:
    async def speak() -> None:
        near, far = socket.socketpair()
        far.send(HEAD.pack(0, control_protocol.LONGEST + 1))
        reader, writer = await asyncio.open_connection(sock=near)
        with far, contextlib.closing(writer), pytest.raises(ConnectionError, match="no piece of a stream"):
            await asyncio.wait_for(serve_store(StoreKeys(), reader, writer), 60)

    asyncio.run(speak())
