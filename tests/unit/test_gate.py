"""The gate under strangers and many machines, which are clients of the control protocol, and ranks of the store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import os
import pickle
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch.agreed_stop.wire import NAME, FreezeRanks, StopRanks
from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.machines import link as machines_link
from mlaunch.machines.agent import join_machines
from mlaunch.machines.gate import UVLOOP, GateConfig, GateProcess, admission
from mlaunch.machines.gate import gate as gate_module
from mlaunch.machines.gate.gate import Gate
from mlaunch.machines.gate.roster import Roster
from mlaunch.machines.link import LinkProcess, RankStreams
from mlaunch.machines.wire import Beat, Done, Join, Planned, control_protocol, failure_of_record, shortened
from mlaunch.machines.wire.control_protocol import Pieces
from mlaunch.protocol import channel
from mlaunch.protocol import token as tokens
from mlaunch.protocol.messages import ForPart, Waiting
from mlaunch.protocol.server_messages import Ready
from mlaunch.protocol.spec import Rendezvous
from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import listen
from tests.system.network import free_port
from tests.unit.test_membership import roster_of

TOKEN = "hush"


class Served(GateProcess):
    port: int


@contextlib.contextmanager
def served(token: str | None = TOKEN, store_limit: int | None = None) -> Iterator[Served]:
    """Its process, as an agent starts it; ``port`` is the public one."""
    with listen() as public:
        server = Served(GateConfig(public, "launch", token, 60.0, store_limit))
        server.port = public.getsockname()[1]
    yield server
    server.kill()
    server.reap()


@pytest.fixture(params=["asyncio", "uvloop"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
        monkeypatch.delenv(UVLOOP)
    with served() as server:
        yield server


def join(rank_start: int, n_gpus: int, world_size: int, **changes: Any) -> Join:
    return Join(**{"host": f"h{rank_start // n_gpus}", "rank_start": rank_start, "n_gpus": n_gpus,
                   "world_size": world_size, "function": "train", "mlaunch": "0.1", "torch": "2.13",
                   "attempt": 0,
                   **changes})  # fmt: skip


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def enter(port: int, role: str = "control") -> Streams:
    streams = await asyncio.open_connection("127.0.0.1", port, limit=control_protocol.LINE_LIMIT)
    await control_protocol.introduce(*streams, role, TOKEN)
    return streams


async def next_of(reader: asyncio.StreamReader, kind: str) -> Any:
    while True:
        record = await asyncio.wait_for(control_protocol.read(reader), 60)
        if kind in record:
            return record[kind]


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many descriptors as the system allows, for those that keep a thousand connections in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Barrier:
    """As asyncio's, which Python 3.10 lacks."""

    def __init__(self, parties: int) -> None:
        self._parties, self._come, self._open = parties, 0, asyncio.Event()

    async def wait(self) -> None:
        self._come += 1
        mine = self._open
        if self._come == self._parties:
            self._come, self._open = 0, asyncio.Event()
            mine.set()
        await mine.wait()


async def ranks_of_a_machine(gate: int, numbers: range, pool: ThreadPoolExecutor, all_here: Barrier) -> list[bytes]:
    """Each is a client of the store that comes through the gate, and reads what its neighbour has written.

    They stay until those of all machines have.
    """
    loop, listener, over = asyncio.get_running_loop(), listen(), asyncio.Event()
    splicing = asyncio.ensure_future(carry_for_ranks(gate, listener, over.wait()))
    port = listener.getsockname()[1]

    def come(number: int) -> dist.TCPStore:
        client = tcp_store.connect("127.0.0.1", port, timedelta(seconds=60))
        client.set(f"rank {number}", f"{number} is here")
        return client

    clients = await asyncio.gather(*(loop.run_in_executor(pool, come, number) for number in numbers))
    await all_here.wait()
    neighbours = [f"rank {(number + 1) % RANKS}" for number in numbers]
    work = [loop.run_in_executor(pool, client.get, name) for client, name in zip(clients, neighbours, strict=True)]
    said = await asyncio.gather(*work)
    await all_here.wait()
    clients.clear()
    work.clear()
    over.set()
    await splicing
    return said


MACHINES, RANKS = 64, 1024


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_many_machines_join_and_hear_of_a_failure(gate: Served) -> None:
    """64 machines of 16 ranks; each rank is a store client that comes through the gate."""
    ranks = RANKS // MACHINES
    said: dict[int, list[bytes]] = {}

    async def machine(index: int, all_here: Barrier) -> tuple[Any, Any]:
        reader, writer = await enter(gate.port)
        await control_protocol.send(writer, {"join": join(index * ranks, ranks, RANKS).as_record()})
        plan = await next_of(reader, "plan")
        numbers = range(index * ranks, (index + 1) * ranks)
        said[index] = await ranks_of_a_machine(gate.port, numbers, pool, all_here)
        failure = {"rank": "the culprit"}
        if index == 7:
            await control_protocol.send(writer, {"failure": {"what": "raised ValueError: boom", "rank": 119}})
        else:
            failure = await next_of(reader, "failure")
            writer.close()
        return plan["launch_id"], failure["rank"]

    async def everyone() -> list[Any]:
        all_here = Barrier(MACHINES)
        return await asyncio.gather(*(machine(index, all_here) for index in range(MACHINES)))

    with ThreadPoolExecutor(16) as pool, tcp_store.from_files_only():  # as ranks do
        results = asyncio.run(everyone())
    assert [text for index in range(MACHINES) for text in said[index]] == [
        f"{(number + 1) % RANKS} is here".encode() for number in range(RANKS)
    ]
    assert {launch for launch, _ in results} == {"launch"}
    assert [failure for _, failure in results].count(119) == MACHINES - 1


def test_a_launch_of_many_machines_is_told_in_few_bytes(gate: Served) -> None:
    """And a machine that does not read keeps nobody from hearing of a failure."""
    machines = 200

    async def machine(index: int, deaf: asyncio.Event) -> int:
        reader, writer = await enter(gate.port)
        await control_protocol.send(writer, {"join": join(index, 1, machines, host="h" * 200).as_record()})
        told = 0
        while "plan" not in (record := await asyncio.wait_for(control_protocol.read(reader), 60)):
            told += len(control_protocol.encode(record))
        if index == 0:
            await deaf.wait()
        elif index == 1:
            await control_protocol.send(
                writer, {"failure": {"what": "raised ValueError: boom", "traceback": "x" * 15_000}}
            )
        else:
            assert (await next_of(reader, "failure"))["what"] == "raised ValueError: boom"
        writer.close()
        return told + len(control_protocol.encode(record))

    async def everyone() -> int:
        deaf = asyncio.Event()
        silent = asyncio.ensure_future(machine(0, deaf))
        told = await asyncio.gather(*(machine(index, deaf) for index in range(1, machines)))
        deaf.set()
        return sum(told) + await silent

    assert asyncio.run(everyone()) < 4_000 * machines


def test_a_machine_that_comes_after_a_failure_is_not_refused(gate: Served) -> None:
    """It is a machine that was lost and is back: its link tries again until the next attempt begins."""

    async def come_back() -> bytes:
        streams = await enter(gate.port)
        await control_protocol.send(streams[1], {"join": join(0, 1, 1).as_record()})
        await next_of(streams[0], "plan")
        await control_protocol.send(streams[1], {"failure": {"what": "was killed by SIGKILL"}})
        again = await enter(gate.port)
        await asyncio.sleep(0)
        await control_protocol.send(again[1], {"join": join(0, 1, 1).as_record()})
        said = await again[0].read(1000)
        for _, writer in (streams, again):
            writer.close()
        return said

    assert b"refused" not in asyncio.run(come_back())


def test_the_master_hears_of_a_refusal_when_the_others_have(gate: Served) -> None:
    """It ends the gate, and another that had not read it would wait for its join_timeout."""
    heard: list[str] = []

    async def machine(name: str, *at: int) -> None:
        reader, writer = await enter(gate.port)
        await control_protocol.send(writer, {"join": join(*at).as_record()})
        if name in joined:
            await next_of(reader, "waiting")
            joined[name].set()
        await next_of(reader, "refused")
        heard.append(name)
        writer.close()

    async def all_machines() -> None:
        first = asyncio.ensure_future(machine("master", 0, 1, 3))
        second = asyncio.ensure_future(machine("second", 1, 1, 3))
        await asyncio.gather(*(event.wait() for event in joined.values()))
        await asyncio.gather(first, second, machine("third", 2, 1, 4))

    joined = {name: asyncio.Event() for name in ("master", "second")}
    asyncio.run(all_machines())
    assert sorted(heard[:2]) == ["second", "third"]
    assert heard[2:] == ["master"]


def test_a_refused_machine_may_be_gone_before_it_is_told(gate: Served, capfd: pytest.CaptureFixture[str]) -> None:
    async def leave_at_once() -> str:
        for _ in range(20):
            _, writer = await enter(gate.port)
            await control_protocol.send(writer, {"join": join(4, 1, 2).as_record()})
            writer.transport.abort()
        reader, writer = await enter(gate.port)
        await control_protocol.send(writer, {"join": join(0, 1, 2).as_record()})
        said = await next_of(reader, "refused")
        writer.close()
        return str(said)

    assert asyncio.run(leave_at_once()) == "host h4 (rank 4) has ranks beyond world_size=2"
    assert "Traceback" not in capfd.readouterr().err  # the gate's own
    asyncio.run(Gate("launch", None, 60.0)._tell_master_last({"refused": "why"}))


def test_a_failure_from_another_machine_is_not_trusted() -> None:
    told = failure_of_record({"what": 7, "rank": "x", "pid": True, "host": "h", "final": 1, "hints": [1], "odd": 2})
    assert told == RankFailure(None, 0, "failed", host="h", hints=("1",))
    long = shortened(RankFailure(1, 2, "x" * 10_000, traceback="begin\n" + "y\n" * 99_999 + "end"))
    assert (len(long.what), long.traceback[:5], long.traceback[-3:]) == (4_000, "begin", "end")
    assert 15_000 < len(long.traceback) <= 16_000


@pytest.mark.parametrize("letter", ["x", "\0", "\N{GRINNING FACE}", "\udcff", '"'])
def test_a_failure_fits_into_every_record_on_its_way(letter: str) -> None:
    long = letter * 100_000
    texts = dict.fromkeys(("what", "phase", "host", "device", "type_name", "traceback", "subject"), long)
    told = shortened(RankFailure(rank=1, pid=2, hints=(long,) * 50, **texts))
    assert len(pickle.dumps(told)) <= channel.RECORD_LIMIT
    assert failure_of_record(json.loads(control_protocol.encode({"failure": asdict(told)}))["failure"]) == told


def test_the_word_on_missing_machines_is_a_summary() -> None:
    """It is sent to every machine, and fits into every record on its way."""
    roster = Roster()
    for rank in range(0, 10_000, 2):
        roster.add(join(rank, 1, 10_000, host=f"{rank:04}" + "\N{GREEK SMALL LETTER MU}" * 251))
    told = roster.describe()
    assert told.startswith("5000 machines joined (0000")
    assert told.endswith(" and 4995 more); ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 4990 more missing")
    assert len(control_protocol.encode({"waiting": told})) <= 4_000


def test_a_line_that_nobody_would_read_is_refused_where_it_comes_from() -> None:
    with pytest.raises(ValueError, match=f"a line holds {control_protocol.LINE_LIMIT}"):
        control_protocol.encode({"failure": "x" * control_protocol.LINE_LIMIT})


def test_a_failure_with_odd_hints_is_still_told() -> None:
    for hints in (7, "text", {"a": 1}, None):
        assert failure_of_record({"what": "broke", "hints": hints}).hints == ()


def test_a_cause_outranks_its_consequence(gate: Served) -> None:
    """Though news of it comes later, from another machine."""

    async def three() -> list[str]:
        streams = [await enter(gate.port) for _ in range(3)]
        for rank, (_, writer) in enumerate(streams):
            await control_protocol.send(writer, {"join": join(rank, 1, 3).as_record()})
        for reader, _ in streams:
            await next_of(reader, "plan")
        await control_protocol.send(streams[0][1], {"failure": {"what": "raised: peer closed", "consequence": True}})
        await control_protocol.send(streams[1][1], {"failure": {"what": "was killed by SIGKILL"}})
        heard = [(await next_of(streams[rank][0], "failure"))["what"] for rank in (0, 2)]
        for _, writer in streams:
            writer.close()
        return heard

    assert asyncio.run(three()) == ["was killed by SIGKILL"] * 2


async def carry_for_ranks(gate: int, listener: socket.socket, over: Coroutine[Any, Any, Any]) -> None:
    """The joining side, as the link does it."""
    async with control_protocol.dialled("127.0.0.1", gate, "store", TOKEN) as streams:
        carrying = asyncio.ensure_future(RankStreams().serve(listener, streams))
        await over
        carrying.cancel()
        await asyncio.wait([carrying])


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_a_thousand_ranks_reach_the_store(gate: Served) -> None:
    over, listener = threading.Event(), listen()
    port = listener.getsockname()[1]
    splicing = carry_for_ranks(gate.port, listener, asyncio.to_thread(over.wait))
    thread = threading.Thread(target=asyncio.run, args=[splicing])
    thread.start()
    start = time.monotonic()
    with ThreadPoolExecutor(16) as pool, tcp_store.from_files_only():  # as ranks do
        connect = functools.partial(tcp_store.connect, "127.0.0.1", port, timedelta(seconds=60))
        clients = list(pool.map(lambda _: connect(), range(1024)))
    for rank, client in enumerate(clients):
        client.set(f"rank {rank}", "x" * 1000)
    print(f"1024 ranks connected and set a value in {time.monotonic() - start:.2f} s")
    assert all(len(clients[0].get(f"rank {rank}")) == 1000 for rank in range(1024))
    del client
    clients.clear()
    gc.collect()
    over.set()
    thread.join(60)
    assert not thread.is_alive()


def memory_of(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def strange(chance: random.Random) -> bytes:
    kinds: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(1, 3000)),
        lambda: b"",
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: b'{"mlaunch": 2, "role": "store", "nonce": "00"}\n' + chance.randbytes(50),
        lambda: b'{"mlaunch": 2, "role": "store", "nonce": "00"}\n{"proof": "00"}\nset everything',
        lambda: b'{"mlaunch": 9, "role": "control", "nonce": "00"}\n',
        lambda: b'{"mlaunch": 1, "role"',
        lambda: b"[" * 5000 + b"\n",
        lambda: b"x" * 300_000,
        lambda: json.dumps({"join": join(0, 1, 1).as_record()}).encode() + b"\n",
    ]
    return chance.choice(kinds)()


def test_a_burst_waits_and_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """More come at once than may be strangers at a time: each is let in, at its first attempt."""
    monkeypatch.setattr(admission, "STRANGERS", 3)
    strangers: list[int] = []

    class Counting(Gate):
        async def _admit(self, *streams: Any) -> str:
            assert self._admission is not None
            strangers.append(self._admission._strangers)
            return await super()._admit(*streams)

    async def burst() -> list[str]:
        async with serving(Counting("launch", TOKEN, 60.0)) as (_, port):
            streams = await asyncio.gather(*(enter(port) for _ in range(40)))
            for number, (_, writer) in enumerate(streams):
                await control_protocol.send(writer, {"join": join(number, 1, 40).as_record()})
            plans = [await next_of(reader, "plan") for reader, _ in streams]
            for _, writer in streams:
                writer.close()
            return [plan["launch_id"] for plan in plans]

    assert asyncio.run(burst()) == ["launch"] * 40
    assert max(strangers) == 3


def test_a_stranger_says_little(gate: Served) -> None:
    """Before its proof; who has proved itself has a longer line."""

    async def talk() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        with contextlib.suppress(OSError):
            writer.write(json.dumps({**HELLO, "more": "x" * admission.STRANGERS_LINE}).encode() + b"\n")
            await writer.drain()
        said = b""
        with contextlib.suppress(ConnectionError):
            said = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        member = await enter(gate.port)
        await control_protocol.send(member[1], {"join": join(0, 1, 1, function="x" * 1000).as_record()})
        await next_of(member[0], "plan")
        member[1].close()
        return said

    assert asyncio.run(talk()) == b""


@pytest.mark.slow
def test_a_silent_connection_holds_nobody_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken by strangers that are silent; soon they are sent away, and a machine comes in."""
    monkeypatch.setattr(admission, "STRANGERS", 3)
    for name in ("PATIENCE", "CROWDED_PATIENCE"):
        monkeypatch.setattr(admission, name, 0.1)

    async def come() -> None:
        async with serving(Gate("launch", TOKEN, 60.0)) as (_, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
            _, writer = await asyncio.wait_for(enter(port), 60)
            for stream in [*silent, (None, writer)]:
                stream[1].close()

    asyncio.run(come())


def test_versions_that_differ_are_told_so(gate: Served) -> None:
    async def come() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        await control_protocol.send(writer, {**HELLO, "mlaunch": 1})
        said = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return said

    said = json.loads(asyncio.run(come()))
    assert said == {"refused": "the versions of mlaunch differ", "mlaunch": control_protocol.PROTOCOL}
    assert control_protocol._other_version({"mlaunch": 1}).startswith("the master speaks protocol 1, this machine ")
    assert (
        control_protocol._other_version({"mlaunch": 10**100})
        == control_protocol._other_version({"mlaunch": True})
        == ""
    )


@pytest.mark.nightly("*uvloop*", "*10000*")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2_000, 10_000])
def test_strangers_change_nothing(gate: Served, count: int) -> None:
    """Connections of nonsense, half of a record, silence; a job in progress meanwhile."""
    chance = random.Random(5)

    async def fuzz() -> tuple[Any, int, int]:
        job = await enter(gate.port)
        await control_protocol.send(job[1], {"join": join(0, 1, 2).as_record()})
        await next_of(job[0], "waiting")
        before = 0
        silent = []
        for number in range(count):
            if number == 1_000:
                before = memory_of(gate.pid)
            reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
            writer.write(strange(chance))
            if number % 50 == 0:
                silent.append(writer)  # it stays, and says no more
                continue
            with contextlib.suppress(OSError):  # the gate may have closed it already
                writer.write_eof()
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(100_000), 60)
            assert all(line.startswith((b'{"challenge": ', b'{"refused": ')) for line in answer.splitlines())
            writer.close()
        other = await enter(gate.port)
        await control_protocol.send(other[1], {"join": join(1, 1, 2).as_record()})
        plan = await next_of(job[0], "plan")
        after = memory_of(gate.pid)
        for writer in [*silent, job[1], other[1]]:
            writer.close()
        return plan, before, after

    plan, before, after = asyncio.run(fuzz())
    assert plan["launch_id"] == "launch"
    assert after - before < 64 * 2**20, f"{before} -> {after}"


HELLO: dict[str, Any] = {"mlaunch": control_protocol.PROTOCOL, "role": "control", "nonce": "0" * 32}
ODD: list[list[Any]] = [
    [[]],
    [7],
    [HELLO, ["join"]],
    [{**HELLO, "nonce": "\ud800"}],
    [{**HELLO, "nonce": "x" * 200_000}],
    [{**HELLO, "nonce": 7}],
    [{**HELLO, "role": "\ud800"}],
    [{**HELLO, "role": []}],
    [{**HELLO, "mlaunch": "\ud800" * 40_000}],
    [{**HELLO, "mlaunch": 10**4000}],
    [HELLO, {"proof": "\N{LATIN SMALL LETTER E WITH ACUTE}"}],
    [HELLO, {"proof": "\ud800"}],
    [HELLO, {"proof": []}],
    [HELLO, {"join": {"host": []}}],
    [HELLO, {"join": join(0, 1, 1, host="\ud800").as_record()}],
]


@contextlib.asynccontextmanager
async def serving(gate: Gate) -> AsyncIterator[tuple[str, int]]:
    """Here, so that what it writes and logs can be read; yields its address."""
    with listen() as listener:
        task = asyncio.ensure_future(gate.serve(listener))
        yield listener.getsockname()
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("token", [TOKEN, None])
def test_strangers_make_the_gate_say_nothing(
    token: str | None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def speak(address: tuple[str, int], records: list[Any]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(OSError):  # it has heard enough
            writer.writelines(json.dumps(record).encode() + b"\n" for record in records)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 60)
        writer.close()

    async def everyone() -> None:
        async with serving(Gate("launch", token, 60.0)) as address:
            for records in ODD:
                await speak(address, records)

    asyncio.run(everyone())
    assert capfd.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records] == []


def test_a_connection_that_proves_itself_and_says_no_more_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Gate):
        async def _admit(self, *streams: Any) -> str:
            admitted = await super()._admit(*streams)
            monkeypatch.setattr(gate_module, "PATIENCE", 0.0)
            return admitted

    async def come() -> bytes:
        async with serving(Impatient("launch", TOKEN, 60.0)) as (_, port):
            reader, writer = await enter(port, "control")
            said = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return said

    assert asyncio.run(come()) == b""


def test_an_error_of_ours_is_one_bounded_line_and_soon_none(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(Gate):
        async def _admit(self, *_: Any) -> str:
            raise RuntimeError("line\n\x1b" * 1000)

    async def knock(times: int) -> None:
        async with serving(Broken("launch", None, 60.0)) as address:
            for _ in range(times):
                reader, writer = await asyncio.open_connection(*address)
                assert await asyncio.wait_for(reader.read(), 60) == b""
                writer.close()

    asyncio.run(knock(20))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 5
    assert all(line.startswith("mlaunch: the gate closed a connection: RuntimeError 'line") for line in said)
    assert all(line.isprintable() and len(line) < 1000 for line in said)


# A launch that runs, and ends


async def members(port: int, *joins: Join) -> list[Streams]:
    streams = [await enter(port) for _ in joins]
    for (_, writer), said in zip(streams, joins, strict=True):
        await control_protocol.send(writer, {"join": said.as_record()})
    return streams


def test_the_port_is_free_before_anyone_hears_of_the_end(gate: Served) -> None:
    """The next call of the same function uses it."""

    async def run_and_bind() -> None:
        streams = await members(gate.port, join(0, 1, 2), join(1, 1, 2))
        for reader, writer in streams:
            await next_of(reader, "plan")
            await control_protocol.send(writer, {"done": 1})
        await next_of(streams[1][0], "over")
        listen(port=gate.port).close()
        for _, writer in streams:
            writer.close()

    asyncio.run(run_and_bind())


def test_machines_of_a_launch_get_a_secret_that_no_other_launch_has() -> None:
    """Without a token, too, so that only who has joined can sign what ranks read."""

    async def secrets_of(port: int) -> set[str]:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for number, (reader, writer) in enumerate(streams):
            await control_protocol.introduce(reader, writer, "control", None)
            await control_protocol.send(writer, {"join": join(number, 1, 2).as_record()})
        found = {(await next_of(reader, "plan"))["secret"] for reader, _ in streams}
        for _, writer in streams:
            writer.close()
        return found

    with served(None) as first, served(None) as second:
        both = [asyncio.run(secrets_of(one.port)) for one in (first, second)]
    assert [len(found) for found in both] == [1, 1]
    assert both[0] != both[1]


@contextlib.asynccontextmanager
async def link_to(serve: Any, agent: channel.Channel) -> AsyncIterator[LinkProcess]:
    """A machine's link, without a token, to a master that answers as ``serve`` does."""
    with listen() as listener:
        server = await asyncio.start_server(serve, sock=listener)
        cluster = Rendezvous(*listener.getsockname(), None, join_timeout=600.0, heartbeat_timeout=60.0)
        yield LinkProcess(cluster, join(1, 1, 2), agent)
        server.close()


def test_what_a_master_says_does_not_command_a_terminal() -> None:
    """What a launch waits for, why it is refused, and why ranks are to stop."""
    evil, shown = "a\x1b[2Jb", r"a\x1b[2Jb"

    async def talk() -> None:
        cluster = Rendezvous("127.0.0.1", 1, None, join_timeout=600.0, heartbeat_timeout=60.0)
        machine = LinkProcess(cluster, join(1, 1, 2), theirs)
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(control_protocol.encode, ({"waiting": evil}, {"refused": evil}))))
        with pytest.raises(control_protocol.RefusedError) as refused:
            await machine._wait_for_plan(reader)
        assert (machine._wait.joined, str(refused.value)) == (shown, shown)

    ours, theirs = channel.Channel.pair()
    asyncio.run(talk())
    ours.close()
    theirs.close()
    assert machines_link.order_of({"freeze": evil}) == ForPart(NAME, 0, FreezeRanks(shown))
    assert machines_link.order_of({"stop_at": 3, "reason": evil}) == ForPart(NAME, 0, StopRanks(3, shown))


def test_a_plan_that_leads_elsewhere_is_not_followed() -> None:
    """Whoever listens at the master's port first may be anybody, without a token."""
    plan = {"launch_id": "../../users", "attempt": 0, "num_nodes": 2, "world_size": 2, "node_rank": 1, "rank_start": 1,
            "role_start": 1, "role_size": 2, "secret": ""}  # fmt: skip
    heard: list[object] = []
    tried = asyncio.Event()
    knocks = 0

    async def plan_evil(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        await control_protocol.read(reader)
        await control_protocol.send(writer, {"welcome": control_protocol.PROTOCOL})
        await control_protocol.send(writer, {"plan": plan})
        knocks += 1
        if knocks > 1:
            tried.set()
        writer.close()

    async def link() -> None:
        ours, theirs = channel.Channel.pair()
        async with link_to(plan_evil, theirs) as machine:
            running = asyncio.ensure_future(machine.run(None))
            await asyncio.wait_for(tried.wait(), 60)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        theirs.close()
        with contextlib.suppress(EOFError):
            while True:
                heard.append(ours.receive()[0])
        ours.close()

    asyncio.run(link())
    assert not [record for record in heard if isinstance(record, Planned)]


def test_only_the_first_failure_is_told(gate: Served) -> None:
    async def three() -> list[str]:
        first, second, third = streams = await members(gate.port, *(join(rank, 1, 3) for rank in range(3)))
        await next_of(first[0], "plan")  # all have joined: after a failure, nobody does any more
        await control_protocol.send(first[1], {"failure": {"what": "raised ValueError"}})
        told = [(await next_of(third[0], "failure"))["what"]]
        await control_protocol.send(second[1], {"failure": {"what": "was killed by SIGKILL"}})
        for _, writer in streams:
            await control_protocol.send(writer, {"done": 1})
        while "over" not in (record := await asyncio.wait_for(control_protocol.read(third[0]), 60)):
            told += [record["failure"]["what"]] if "failure" in record else []
        for _, writer in streams:
            writer.close()
        return told

    assert asyncio.run(three()) == ["raised ValueError"]


@pytest.mark.slow
def test_a_waiting_machine_hears_that_another_has_left(gate: Served) -> None:
    async def come_and_leave() -> list[str]:
        [(reader, first)] = await members(gate.port, join(0, 1, 3))
        told = [await next_of(reader, "waiting")]
        [(_, second)] = await members(gate.port, join(1, 1, 3))
        told.append(await next_of(reader, "waiting"))
        second.close()
        told.append(await next_of(reader, "waiting"))
        first.close()
        return told

    alone, both, alone_again = asyncio.run(come_and_leave())
    assert both == "2 machines joined (h0, h1); rank 2 missing"
    assert alone == alone_again == "1 machine joined (h0); ranks 1-2 missing"


def test_the_attempt_is_that_of_those_who_stayed(gate: Served) -> None:
    """A machine that comes back with a new process counts from 0."""

    async def plans() -> list[int]:
        streams = await members(gate.port, join(0, 1, 3), join(1, 1, 3, attempt=2), join(2, 1, 3))
        told = [(await next_of(reader, "plan"))["attempt"] for reader, _ in streams]
        for _, writer in streams:
            writer.close()
        return told

    assert asyncio.run(plans()) == [2, 2, 2]


async def until(condition: Callable[[], object]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), 60)


async def heard_of_a_failure(strangers: int = 0, here: int = 0, *, fails: bool = True) -> list[object]:
    """What a link tells its agent of a launch that begins, fails and loses its master; some knock while it runs.

    ``here``: the first rank on the link's machine, of two. ``fails``: before the master is lost.
    """
    ours, theirs = channel.Channel.pair()
    heard: list[object] = []
    loop, gate = asyncio.get_running_loop(), Gate("launch", TOKEN, 60.0)
    loop.add_reader(ours.fileno(), lambda: heard.append(ours.receive()[0]))
    async with serving(gate) as address:
        cluster = Rendezvous(*address, TOKEN, join_timeout=60.0, heartbeat_timeout=60.0)
        machine = LinkProcess(cluster, join(here, 1, 2), theirs)
        link = asyncio.ensure_future(machine.run(None))
        await until(lambda: gate._members)
        [(reader, writer)] = await members(address[1], join(1 - here, 1, 2))
        await next_of(reader, "plan")
        for _ in range(strangers):
            async with control_protocol.dialled(*address, "control", TOKEN):
                pass
        if fails:
            await control_protocol.send(writer, {"failure": {"what": "was killed by SIGKILL"}})
            await until(lambda: gate._failure)
        sorted(gate._members, key=lambda member: member.join.place)[here].writer.close()
        await asyncio.wait_for(link, 60)
        writer.close()
        await until(lambda: gate._ended and not gate._tasks)
    loop.remove_reader(theirs.fileno())
    theirs.close()
    loop.remove_reader(ours.fileno())
    with contextlib.suppress(EOFError):
        while True:
            heard.append(ours.receive()[0])
    ours.close()
    return [record for record in heard if not isinstance(record, Beat)]


def test_a_launch_that_failed_does_not_miss_its_master() -> None:
    """Who has told of the failure ends; that its connection is closed is no second failure."""
    heard = asyncio.run(heard_of_a_failure())
    assert [type(record) for record in heard] == [Planned, RankFailure]
    assert heard[1] == RankFailure(None, 0, "was killed by SIGKILL")


@pytest.mark.parametrize("here", [0, 1])
def test_a_machine_that_has_failed_itself_does_not_miss_its_master(here: int) -> None:
    """Its own agent has told why; the gate may go with it."""

    async def run() -> list[object]:
        ours, theirs = channel.Channel.pair()
        loop, gate = asyncio.get_running_loop(), Gate("launch", TOKEN, 60.0)
        async with serving(gate) as address:
            cluster = Rendezvous(*address, TOKEN, join_timeout=60.0, heartbeat_timeout=60.0)
            link = asyncio.ensure_future(LinkProcess(cluster, join(here, 1, 2), theirs).run(None))
            await until(lambda: gate._members)
            [(reader, writer)] = await members(address[1], join(1 - here, 1, 2))
            await next_of(reader, "plan")
            ours.try_send(RankFailure(here, 1, "raised ValueError"))
            await until(lambda: gate._failure)
            sorted(gate._members, key=lambda member: member.join.place)[here].writer.close()
            await asyncio.wait_for(link, 60)
            writer.close()
            await until(lambda: gate._ended and not gate._tasks)
        loop.remove_reader(theirs.fileno())
        theirs.close()
        heard: list[object] = []
        with contextlib.suppress(EOFError):
            while True:
                heard.append(ours.receive()[0])
        ours.close()
        return [record for record in heard if not isinstance(record, Beat)]

    assert [type(record) for record in asyncio.run(run())] == [Planned]


def test_a_way_to_the_store_that_ends_alone_is_a_failure() -> None:
    """The machine's ranks could reach nobody, and would wait for their timeout."""

    class Forgetful(Gate):
        async def _admit(self, *streams: Any) -> str:
            role = await super()._admit(*streams)
            if role == "store":
                raise ConnectionError("forgotten")
            return role

    async def run() -> RankFailure:
        ours, theirs = channel.Channel.pair()
        heard: asyncio.Queue[object] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), lambda: heard.put_nowait(ours.receive()[0]))
        async with serving(Forgetful("launch", TOKEN, 60.0)) as address:
            cluster = Rendezvous(*address, TOKEN, join_timeout=60.0, heartbeat_timeout=60.0)
            machine = LinkProcess(cluster, join(0, 1, 1), theirs)
            link = asyncio.ensure_future(machine.run(listen()))
            while not isinstance(record := await asyncio.wait_for(heard.get(), 60), RankFailure):
                pass
            ours.try_send(Done())  # as an agent whose ranks have ended: else the link goes on
            await asyncio.wait_for(link, 60)
        for end in (ours, theirs):
            loop.remove_reader(end.fileno())
            end.close()
        return record

    failure = asyncio.run(run())
    assert failure.who.startswith("the connection of host ")
    assert failure.what == "broke: its connection was closed"


@pytest.mark.parametrize("here", [0, 1])
def test_a_master_that_is_lost_is_no_cause_on_its_own_machine(here: int) -> None:
    """There it is the consequence of what has ended the gate."""
    _, failure = asyncio.run(heard_of_a_failure(here=here, fails=False))
    assert isinstance(failure, RankFailure)
    assert (failure.what, failure.consequence) == ("was lost: its connection was closed", here == 0)


def test_a_master_is_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts double up to a limit: these would come to last for weeks."""
    monkeypatch.setattr(machines_link, "_RETRY_DELAYS", (0.001, 0.002))
    attempts: list[None] = []

    def turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(None)
        if len(attempts) > 30:
            writer.write(control_protocol.encode({"refused": "enough"}))
        writer.close()

    async def look() -> None:
        ours, theirs = channel.Channel.pair()
        async with link_to(turn_away, theirs) as machine:
            await asyncio.wait_for(machine.run(None), 60)
        asyncio.get_running_loop().remove_reader(theirs.fileno())
        for end in (ours, theirs):
            end.close()

    asyncio.run(look())


def test_joining_takes_its_time_off_the_deadline() -> None:
    cluster = Rendezvous("127.0.0.1", free_port(), TOKEN, join_timeout=60.0, heartbeat_timeout=60.0)
    machine = ThisMachine(Ready("2.13", None, ("gloo",)), lambda _environ: 0)
    spec = plan(Options(n_gpus=1, deadline=1000.0), machine, "train()", {}, Attempt(0, None))
    (ours, theirs), parent = channel.Channel.pair(), os.pidfd_open(os.getpid())
    with listen() as listener:
        joined = join_machines(dataclasses.replace(spec, cluster=cluster), cluster, listener, ours, parent, ())
    link, server = joined.peers._link, joined.server
    assert link is not None
    assert server is not None
    server.kill()
    server.reap()
    os.kill(link.pid, signal.SIGKILL)
    os.waitpid(link.pid, 0)
    for end in (ours, theirs, link.channel):
        end.close()
    os.close(parent)
    assert joined.spec.seconds is not None
    assert 0.0 < joined.spec.seconds < 1000.0


def test_nobody_is_reminded_of_a_launch_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_MESSAGE_DELAY", "_REMINDER_DELAY", "_CHECK_DELAY"):
        monkeypatch.setattr(machines_link, name, 0.0)
    heard = asyncio.run(heard_of_a_failure(strangers=20))  # of which each takes as long as some words
    kinds = [type(record) for record in heard]
    assert set(kinds[: kinds.index(Planned)]) == {Waiting}
    assert kinds[kinds.index(Planned) :] == [Planned, RankFailure]


def test_nothing_is_known_without_the_token(gate: Served) -> None:
    """Whoever connects gets a nonce: no proof, at which guesses could be tried, and no token."""

    async def watch() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        await control_protocol.send(writer, {"mlaunch": control_protocol.PROTOCOL, "role": "store", "nonce": "0" * 32})
        challenge = await control_protocol.read(reader)
        assert challenge.keys() == {"challenge"}
        await control_protocol.send(writer, {"proof": "0" * 64})
        answer = await reader.read(10_000)
        writer.close()
        return answer

    said = asyncio.run(watch())
    assert json.loads(said) == {"refused": "wrong token"}


UNPROVED: list[Any] = [
    {"proof": control_protocol._prove("guessed", "server", "0" * 32, "0" * 32, "control")},
    {"proof": []},
    {"refused": "\x1b[2Jgo away"},
    {"welcome": control_protocol.PROTOCOL},
    {"plan": {}},
]


@pytest.mark.parametrize("number", range(len(UNPROVED)))
@pytest.mark.parametrize("at_once", [True, False])
def test_a_master_that_cannot_prove_the_token_decides_nothing(
    number: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link tries again: somebody else may listen there for a while. Nothing of its own words is shown."""
    monkeypatch.setattr(machines_link, "_RETRY_DELAYS", (0.001, 0.002))
    beyond: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await control_protocol.read(reader)
            if not at_once:
                await control_protocol.send(writer, {"challenge": "0" * 32})
                await control_protocol.read(reader)
            await control_protocol.send(writer, UNPROVED[number])
            beyond.append(await reader.read())
        writer.close()

    async def meet_impostor() -> str:
        ours, theirs = channel.Channel.pair()
        with listen() as listener:
            server = await asyncio.start_server(answer, sock=listener)
            cluster = Rendezvous(*listener.getsockname(), TOKEN, join_timeout=600.0, heartbeat_timeout=60.0)
            machine = LinkProcess(cluster, join(1, 1, 2), theirs)
            task = asyncio.ensure_future(machine.run(None))
            await until(lambda: len(beyond) > 3)
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])
            server.close()
        asyncio.get_running_loop().remove_reader(theirs.fileno())
        for end in (ours, theirs):
            end.close()
        return machine._wait.state()

    said = asyncio.run(meet_impostor())
    assert set(beyond) == {b""}  # nothing of this machine was told
    assert "go away" not in said
    assert said.isprintable()


def test_a_token_is_not_tried_at_the_price_of_a_digest() -> None:
    """What is proved is a key that takes long to make; one that we have drawn needs none."""
    key = tokens.key_of("secret")
    assert key == tokens.key_of("secret") != tokens.key_of("secrets")
    assert key != hashlib.sha256(b"secret").hexdigest()
    assert tokens.key_of(drawn := tokens.draw()) == drawn
    assert len(drawn) >= tokens.SHORTEST


def test_a_proof_holds_for_one_role(gate: Served) -> None:
    async def pretend() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        await control_protocol.send(writer, {**HELLO, "role": "control"})
        challenge = await control_protocol.read(reader)
        proof = control_protocol._prove(TOKEN, "client", HELLO["nonce"], challenge["challenge"], "store")
        await control_protocol.send(writer, {"proof": proof})
        said = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return said

    assert b"wrong token" in asyncio.run(pretend())


def test_machines_that_fit_together() -> None:
    one = roster_of(join(0, 2, 5))
    assert not roster_of().complete
    assert roster_of(join(0, 2, 5), join(4, 1, 5)).missing() == [range(2, 4)]
    assert one.describe() == "1 machine joined (h0); ranks 2-4 missing"
    assert one.conflict(join(2, 2, 5)) == ""
    assert roster_of().conflict(join(4, 2, 5)) == "host h2 (ranks 4-5) has ranks beyond world_size=5"
    assert one.conflict(join(2, 2, 5, torch="2.6")) == "host h0 has torch 2.13, host h1 has torch 2.6"
    assert one.conflict(join(2, 2, 5, mlaunch="1.0")) == "host h0 has mlaunch 0.1, host h1 has mlaunch 1.0"
    for name, value in (("heartbeat_timeout", "9"), ("backend", "nccl"), ("timeout", "None"), ("stop_grace", "1")):
        said = f"host h0 has {name}=, host h1 has {name}={value}"
        assert one.conflict(join(2, 2, 5, **{name: value})) == said
    assert one.conflict(join(2, 2, 5, max_restarts=3)) == "host h0 has max_restarts=0, host h1 has max_restarts=3"
    assert one.conflict(join(1, 2, 5)) == "rank 1 would be on host h0 and on host h0: give each its own rank_start"


@pytest.mark.parametrize("seed", range(20))
def test_a_machine_that_overlaps_is_found_among_many(seed: int) -> None:
    """Against looking at each: machines of many sizes come in any order, and some leave again."""
    chance, roster, there = random.Random(seed), Roster(), []
    for _ in range(100):
        new = join(chance.randrange(190), chance.randrange(1, 11), 200)
        clash = any(set(new.ranks) & set(other.ranks) for other in there)
        assert bool(roster.conflict(new)) == clash
        if not clash:
            roster.add(new)
            there.append(new)
        if there and chance.random() < 0.3:
            roster.remove(there.pop(chance.randrange(len(there))))
        brought = {rank for other in there for rank in other.ranks}
        if there:
            assert {rank for run in roster.missing() for rank in run} == set(range(200)) - brought
        assert roster.complete == (len(brought) == 200)


@pytest.mark.parametrize("record", [
    None, [], {}, {"host": "h"}, {**join(0, 1, 1).as_record(), "n_gpus": "1"},
    join(0, 1, 1, host="\x1b[2J").as_record(), join(0, 1, 1, host="h" * 256).as_record(),
    join(0, 1, 10**12).as_record(), join(0, 10**12, 1, host="h").as_record(),
])  # fmt: skip
def test_a_record_that_is_no_join(record: Any) -> None:
    with pytest.raises(ConnectionError, match="what came is no join"):
        Join.of_record(record)


def test_a_store_that_is_full_says_by_which_limit(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank itself sees its connection close; torch's protocol has no word for it."""
    greeting = b"\x00\xce\xf7\x85\x3c"
    said = greeting + b"\x01\x01" + bytes(7) + b"k" + (3000).to_bytes(8, "little") + bytes(3000)

    async def fill(port: int) -> list[tuple[int, bytes]]:
        async with control_protocol.dialled("127.0.0.1", port, "store", None) as (reader, writer):
            pieces = Pieces(reader, writer)
            answers = pieces.received()
            for stream in range(2):
                pieces.send(stream, said)
            return [await asyncio.wait_for(anext(answers), 60) for _ in range(2)]

    with served(None, store_limit=2000) as server:
        assert asyncio.run(fill(server.port)) == [(0, b""), (1, b"")]
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "mlaunch: the store of this launch is full, and a rank that asked for more lost its connection. Without a "
        "token, strangers may reach the store, so it has a limit: give token=, or more MiB by MLAUNCH_STORE_LIMIT="
    )
