"""Who stands on the wire between machines: reads all that passes, says it again, or puts something else there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlaunch.compat.wire import Signer
from mlaunch.machines.gate import GateConfig, GateProcess
from mlaunch.machines.wire import Join, control_protocol
from mlaunch.protocol import token as tokens
from mlaunch.rendezvous.address import LOOPBACK, listen

TOKEN = "the word that all machines know"
KEY = tokens.key_of(TOKEN)


class Wire:
    """Carries between who connects to ``port`` and the other end. ``said``: in both directions, the client's first."""

    def __init__(self, change: Callable[[bytes], bytes] = bytes) -> None:
        self._carrying: list[asyncio.Task[Any]] = []
        self._change = change
        self.said = bytearray(), bytearray()
        self.port = 0

    @contextlib.asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[Wire]:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._carrying.append(asyncio.current_task())  # type: ignore[arg-type]
            there, back = await asyncio.open_connection(LOOPBACK, port)
            await asyncio.gather(self._pump(reader, back, self.said[0]), self._pump(there, writer, self.said[1]))

        with listen() as listener:
            self.port = listener.getsockname()[1]
            server = await asyncio.start_server(carry, sock=listener)
            yield self
            server.close()
            await asyncio.wait(self._carrying, timeout=60)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                said += data
                writer.write(self._change(data))
        writer.close()


@contextlib.contextmanager
def gate() -> Any:
    with listen() as public:
        port, server = public.getsockname()[1], GateProcess(GateConfig(public, "launch", KEY, 60.0))
    try:
        yield port
    finally:
        server.kill()
        server.reap()


async def joined(port: int) -> dict[str, Any]:
    """A machine joins, alone; returns the plan."""
    machine = Join("h0", 0, 1, 1, "train", "0.1", "2.13", 0)
    async with control_protocol.dialled(LOOPBACK, port, "control", KEY) as (reader, writer):
        await control_protocol.send(writer, {"join": machine.as_record()})
        while "plan" not in (record := await asyncio.wait_for(control_protocol.read(reader), 60)):
            pass
    plan: dict[str, Any] = record["plan"]
    return plan


async def answer_to(port: int, said: bytes) -> bytes:
    """What comes to who says that, of others' words."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    with contextlib.closing(writer):
        writer.write(said)
        return await asyncio.wait_for(reader.readline(), 60) + await asyncio.wait_for(reader.readline(), 60)


async def stands_in(said: bytes) -> str:
    """What a machine says of a master that says that, of another's words."""

    gone = asyncio.Event()

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        gone.set()

    with listen() as listener:
        server = await asyncio.start_server(repeat, sock=listener)
        try:
            await joined(listener.getsockname()[1])
        except ConnectionError as error:
            return str(error)
        finally:
            await asyncio.wait_for(gone.wait(), 60)
            server.close()
    return "joined"


def test_a_reader_of_the_wire_can_stand_in_for_nobody() -> None:
    async def read_all(port: int) -> tuple[dict[str, Any], bytes, bytes, list[str]]:
        async with Wire().to(port) as wire:
            plan = await joined(wire.port)
            mine, theirs = map(bytes, wire.said)
            refused = json.loads((await answer_to(port, mine)).splitlines()[1])
            return plan, mine, theirs, [str(refused), await stands_in(theirs)]

    with gate() as port:
        plan, mine, theirs, told = asyncio.run(read_all(port))
    for secret in (TOKEN.encode(), KEY.encode()):
        assert secret not in mine + theirs
    assert plan["secret"].encode() in theirs  # he knows that, and needs the token besides
    assert told == ["{'refused': 'wrong token'}", "wrong token: this machine's and the master's differ"]
    forged = Signer(f"/{plan['secret']}/{plan['launch_id']}").sign("value/x/1", b"evil")
    assert Signer(f"{KEY}/{plan['secret']}/{plan['launch_id']}").open("value/x/1", forged) is None


def change_proof(data: bytes) -> bytes:
    return data.replace(b'"proof": "', b'"proof": "0')


def test_a_changed_proof_of_the_token_keeps_a_machine_from_joining() -> None:
    """And no more: nobody joins by it."""

    async def join_through(port: int) -> str:
        async with Wire(change_proof).to(port) as wire:
            with pytest.raises(ConnectionError) as raised:
                await joined(wire.port)
            return str(raised.value)

    with gate() as port:
        assert asyncio.run(join_through(port)).startswith("wrong token")
        assert asyncio.run(joined(port))["world_size"] == 1
