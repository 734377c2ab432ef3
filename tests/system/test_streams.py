"""Many streams on one connection: nothing is lost, mixed up or kept without bound, and one that ends ends alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from mlaunch.rendezvous import multiplex
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.gate.store_keys import ARRIVED, StoreKeys
from mlaunch.rendezvous.gate.store_service import serve_store
from mlaunch.rendezvous.gate.torch_protocol import GIVE_UP, GIVEN_UP, GO, LONGEST, SIZE, Asked
from mlaunch.rendezvous.link import meetings, streams
from mlaunch.rendezvous.link.store_split import marks
from mlaunch.rendezvous.link.streams import COMING, PASSED, RankStreams
from mlaunch.rendezvous.multiplex import HEAD, MACHINE, Pieces

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
    carried, listener = RankStreams(ranks=2, world_size=4), listen()
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
            said = LARGE
            flooding.write(VALIDATE + said)
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
    assert came == LARGE
    assert kept < 2 * streams._AHEAD


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

    asked = [(stream, asking(Asked.GET, b"%d" % number)) for stream, number in enumerate((2, 0, 1))]
    assert asyncio.run(speak()) == [*asked, (1, b"")]


def test_nothing_is_kept_of_ranks_that_have_left() -> None:
    async def come_and_leave() -> None:
        async with link() as (carried, port, _, __):
            ends = [await rank(port) for _ in range(20)]
            for number, (_, end) in enumerate(ends):
                end.write(VALIDATE + asking(Asked.GET, b"x") + meeting(b"%d" % number, 4))
            await until(lambda: len(carried._ends) == len(carried.meetings._coming) == 20)
            for _, end in ends:
                end.close()
            await until(lambda: not carried._ends and not carried._connected)
            assert not any(carried.meetings._coming.values())

    asyncio.run(come_and_leave())


def test_what_is_no_client_of_torchs_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    async def come() -> list[bytes]:
        said = []
        async with link() as (_, port, __, ___):
            nobody = VALIDATE + meeting(b"a", (1 << 64) - 1)
            for nonsense in (b"GET / HTTP/1.1", meeting(b"a", 4), VALIDATE + b"\xff", b"\0\0\0\0\0", nobody):
                reader, end = await rank(port)
                end.write(nonsense)
                said.append(await asyncio.wait_for(reader.read(), 60))
                end.close()
        return said

    assert asyncio.run(come()) == [b""] * 5
    assert capfd.readouterr().err == ""  # a log would be theirs to fill


# Meetings


async def next_piece(coming: AsyncIterator[tuple[int, bytes]]) -> tuple[int, bytes]:
    return await asyncio.wait_for(anext(coming), 60)


async def told_of_one(said: bytes) -> tuple[int, bytes]:
    """What the gate hears first when one rank of two says that."""
    async with link() as (_, port, reader, writer):
        _, end = await rank(port)
        end.write(VALIDATE + said)
        told = await next_piece(Pieces(reader, writer).received())
        end.close()
        return told


def test_a_machine_says_once_how_many_of_its_ranks_have_come() -> None:
    async def meet() -> list[bytes]:
        async with link() as (_, port, reader, writer):
            ends, coming = [await rank(port) for _ in range(2)], Pieces(reader, writer).received()
            for _, end in ends:
                end.write(VALIDATE + meeting(b"all", 4))
            assert await next_piece(coming) == (MACHINE, COMING.pack(0, 2, 4) + b"all")
            writer.write(piece(MACHINE, PASSED.pack(0)))
            told = [await asyncio.wait_for(reader.readexactly(1), 60) for reader, _ in ends]
            for _, end in ends:
                end.close()
            return told

    assert asyncio.run(meet()) == [GO, GO]


def test_a_meeting_of_some_ranks_does_not_wait_for_the_others_of_a_machine() -> None:
    assert asyncio.run(told_of_one(meeting(b"some", 2))) == (MACHINE, COMING.pack(0, 1, 2) + b"some")


def test_who_comes_alone_is_told_of_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says that each rank comes once: a machine whose ranks come less often must not hold up the others."""
    monkeypatch.setattr(meetings, "_PATIENCE", 0.0)
    assert asyncio.run(told_of_one(meeting(b"all", 4))) == (MACHINE, COMING.pack(0, 1, 4) + b"all")


def test_one_that_gives_up_is_not_counted_while_nobody_was_told_of_it() -> None:
    async def meet() -> tuple[bytes, list[tuple[int, bytes]]]:
        async with link() as (_, port, reader, writer):
            ends, coming = [await rank(port) for _ in range(3)], Pieces(reader, writer).received()
            ends[0][1].write(VALIDATE + meeting(b"all", 4) + GIVE_UP)
            answer = await asyncio.wait_for(ends[0][0].readexactly(1), 60)
            for _, end in ends[1:]:
                end.write(VALIDATE + meeting(b"all", 4))
            heard = [await next_piece(coming)]
            ends[0][1].write(GIVE_UP)  # of something else that it asked the store for
            heard.append(await next_piece(coming))
            for _, end in ends:
                end.close()
            return answer, heard

    told = (MACHINE, COMING.pack(0, 2, 4) + b"all")
    assert asyncio.run(meet()) == (GIVEN_UP, [told, (0, GIVE_UP)])


def test_the_gate_counts_machines_and_single_ranks_alike() -> None:
    async def meet() -> list[tuple[int, bytes]]:
        async with store() as (keys, reader, writer):
            writer.write(piece(MACHINE, COMING.pack(7, 2, 4) + b"all") + piece(0, VALIDATE + meeting(b"all", 4)))
            await until(lambda: len(keys._meetings.get(b"all", ())) == 2)
            writer.write(piece(MACHINE, COMING.pack(8, 1, 4) + b"all"))
            coming = Pieces(reader, writer).received()
            return [await next_piece(coming) for _ in range(3)]

    assert asyncio.run(meet()) == [(MACHINE, PASSED.pack(7)), (0, GO), (MACHINE, PASSED.pack(8))]


def test_a_meeting_is_forgotten_with_its_machine() -> None:
    async def come_and_leave() -> StoreKeys:
        async with store() as (keys, _, writer):
            writer.write(piece(MACHINE, COMING.pack(0, 2, 4) + b"all"))
            await until(lambda: keys._meetings)
        return keys

    assert not asyncio.run(come_and_leave())._meetings


def test_what_no_machine_says_ends_its_connection() -> None:
    async def speak(said: bytes) -> None:
        near, far = socket.socketpair()
        far.send(piece(MACHINE, said))
        reader, writer = await asyncio.open_connection(sock=near)
        with far, contextlib.closing(writer), pytest.raises(ConnectionError, match="no word of a machine"):
            await asyncio.wait_for(serve_store(StoreKeys(), reader, writer), 60)

    asyncio.run(speak(b"short"))
    asyncio.run(speak(b""))


# Marks

ARRIVALS = f"launch/{ARRIVED}".encode()


def test_the_marks_of_a_machines_ranks_go_out_together_before_anything_else() -> None:
    async def arrive() -> list[tuple[int, bytes]]:
        async with link() as (carried, port, reader, writer):
            ends, coming, heard = [await rank(port) for _ in range(2)], Pieces(reader, writer).received(), []
            for turn in range(2):
                for number, (_, end) in enumerate(ends):
                    end.write(VALIDATE * (turn == 0) + asking(Asked.APPEND, ARRIVALS, b"%d," % number))
                    await until(lambda number=number: len(carried._marks.get(ARRIVALS, ())) > number)  # type: ignore[misc]
                ends[turn][1].write(asking(Asked.GET, b"x"))
                heard += [await next_piece(coming) for _ in range(2)]
            for _, end in ends:
                end.close()
            return heard

    told, got = (0, marks(ARRIVALS, [b"0,", b"1,"])), asking(Asked.GET, b"x")
    assert asyncio.run(arrive()) == [told, (1, got), told, (2, got)]


def test_marks_do_not_wait_for_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MARKS_DELAY", 0.0)
    told = asyncio.run(told_of_one(asking(Asked.APPEND, ARRIVALS, b"0,")))
    assert told == (0, asking(Asked.APPEND, ARRIVALS, b"0,"))


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


def test_what_a_machine_waited_for_is_forgotten_with_it() -> None:
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
        far.send(HEAD.pack(0, multiplex.LONGEST + 1))
        reader, writer = await asyncio.open_connection(sock=near)
        with far, contextlib.closing(writer), pytest.raises(ConnectionError, match="no piece of a stream"):
            await asyncio.wait_for(serve_store(StoreKeys(), reader, writer), 60)

    asyncio.run(speak())
