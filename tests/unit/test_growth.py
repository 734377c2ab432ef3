"""What processes that run for days have more of after 1,000 times of what they do: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import linecache
import os
import socket
import struct
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.agent.inspection import Inspection
from mlaunch.agent.questions import Questions
from mlaunch.agent.rank_process import StackRequests
from mlaunch.agent.scene import AgentParts
from mlaunch.agent.supervision import Peers
from mlaunch.forkserver import imports
from mlaunch.insight.wire import WATCH
from mlaunch.machines.gate.gate import Gate
from mlaunch.machines.wire import control_protocol
from mlaunch.machines.wire.control_protocol import HEAD
from mlaunch.protocol import by_value, registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import EndCall
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_keys import StoreKeys
from mlaunch.rendezvous.store_server import _MAGIC, Asked, StoreConnection
from mlaunch.sweeps.caller.run_future import ReportLog
from tests.processes import said_in_fork
from tests.soak import Samples

TIMES, BEFORE = 1_000, 10
ALLOWED = 50  # objects: caches that fill up, a list that has another size


def grown(act: Callable[[], object]) -> int:
    """How many objects more there are after 1,000 times, without those that the collector takes."""
    for _ in range(BEFORE):
        act()
    gc.collect()
    gc.freeze()
    try:
        for _ in range(TIMES):
            act()
        gc.collect()
        return len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_the_collector_runs_in_what_is_forked_once_all_is_imported() -> None:
    def share() -> str:
        gc.disable()
        imports.share()
        return str(gc.isenabled())

    assert said_in_fork(share) == "True"


@pytest.mark.slow
def test_an_agent_that_is_looked_at() -> None:
    now, board, requests, questions = [0.0], Board.create(1), StackRequests(lambda *_: False), Questions({})
    context = SimpleNamespace(environ=os.environ, caller=1, cwd="/", argv=[], source="", given="")
    spec: Any = SimpleNamespace(
        context=context, launch_id="looked", rank_start=0, call=SimpleNamespace(name="train()"), world_size=1,
        restarts=SimpleNamespace(count=0), stays=False, cluster=None, device=lambda _: "cpu",
    )  # fmt: skip
    rank: Any = SimpleNamespace(
        rank=0,
        local_rank=0,
        pid=os.getpid(),
        alive=True,
        gone=False,
        answer=None,
        stopped=False,
        rests=False,
        stacks="",
    )
    inspection, (launcher, _) = Inspection(spec, [rank], board, lambda: now[0]), Channel.pair()
    launch: Any = SimpleNamespace(
        by_local_rank=[rank], questions=questions, launcher=launcher, clock=lambda: now[0], board=board,
        stopping=SimpleNamespace(asked=requests), inspection=inspection, peers=Peers(),
        sections={},
    )  # fmt: skip
    parts = AgentParts(launch, lambda *_: None)
    inspection.ask = parts.asked

    def look() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.connect(str(registry.home(os.environ) / "looked.sock"))
            visitor.send(WATCH)  # whose answer has all that others have
            while not (told := _told(visitor)):
                inspection.serve(inspection.fds())
                parts.take_steps(ends=False)
                now[0] += 1.0
            os.close(told[0])

    now[0] = 1.0
    inspection.serve([])
    try:
        assert grown(look) < ALLOWED
    finally:
        inspection.close()
        launcher.close()
        board.close()


def _told(visitor: socket.socket) -> list[int]:
    visitor.setblocking(False)
    try:
        return socket.recv_fds(visitor, 1, 1)[1]
    except BlockingIOError:
        return []


def test_records_on_a_channel() -> None:
    ours, theirs = Channel.pair()

    def say() -> None:
        ours.send(EndCall(1))
        theirs.receive()

    assert grown(say) < ALLOWED
    ours.close()
    theirs.close()


def request(asked: Asked, *strings: bytes, number: bytes = b"") -> bytes:
    return bytes([asked]) + b"".join(struct.pack("<Q", len(string)) + string for string in strings) + number


def requests_of_a_client() -> bytes:
    """All that a rank says to the store from its coming to its end, when it leaves nothing there."""
    return b"".join(
        [
            request(Asked.VALIDATE, number=struct.pack("<I", _MAGIC)),
            request(Asked.SET, b"key", b"value"),
            request(Asked.ADD, b"number", number=struct.pack("<q", 1)),
            request(Asked.PUSH, b"queue", b"value"),
            request(Asked.POP, b"queue"),
            request(Asked.DELETE, b"key"),
            request(Asked.DELETE, b"number"),
            bytes([Asked.WAIT]) + struct.pack("<Q", 1) + struct.pack("<Q", 5) + b"never",
        ]
    )


def test_a_store_and_its_clients() -> None:
    keys, said = StoreKeys(), requests_of_a_client()

    def come_and_go() -> None:
        client = StoreConnection(keys, lambda _: None)
        client.feed(said)
        client.close()

    assert grown(come_and_go) < ALLOWED
    assert not keys.names()


@pytest.mark.slow
def test_a_gate_whose_machines_have_ranks_that_come_and_go() -> None:
    """Connections that prove nothing, too: anybody can make them."""
    said = requests_of_a_client()

    async def measure() -> int:
        with listen() as listener:
            gate = asyncio.ensure_future(Gate("launch", None, 60.0).serve(listener))
            port, streams = listener.getsockname()[1], iter(range(2 * TIMES))
            async with control_protocol.dialled(LOOPBACK, port, "store", None) as (reader, writer):

                async def come_and_go() -> None:
                    stream = next(streams)
                    writer.write(HEAD.pack(stream, len(said)) + said + HEAD.pack(stream, 0))
                    await reader.readexactly(HEAD.size)
                    while reader._buffer:  # type: ignore[attr-defined]
                        await reader.read(1 << 16)
                    if stream % 10 == 0:
                        _, stranger = await asyncio.open_connection(LOOPBACK, port)
                        stranger.write(b"nonsense\n")
                        stranger.close()

                for _ in range(BEFORE):
                    await come_and_go()
                gc.collect()
                gc.freeze()
                for _ in range(TIMES):
                    await come_and_go()
                await asyncio.sleep(0)
                gc.collect()
                found = len(gc.get_objects())
            gate.cancel()
            return found

    try:
        assert asyncio.run(measure()) < 10 * ALLOWED
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("each", "grows"), [(0.0, False), (0.2, False), (2.3, True)])
def test_the_soak_finds_a_line_in_what_is_measured(each: float, grows: bool) -> None:
    """Over looks at an agent that keeps so many KiB of each, beside what fills once and what goes up and down."""
    samples = Samples()
    for second in range(100):
        done = 20 * second
        samples.number += 1
        for whose, kib in (("agent", 9_000 + min(done, 300) + 40 * (second % 3) + each * done), ("caller", 100.0)):
            samples.figures[whose, "KiB"].done.append(done)
            samples.figures[whose, "KiB"].values.append(kib)
    assert [whose for whose, *_, is_much in samples.grown() if is_much] == (["agent"] if grows else [])


def test_reports_of_a_run_that_is_over_take_a_tenth() -> None:
    log, values = ReportLog(), [0.5, 7, "half", None, True, 1 << 70, float("inf")]
    written = [(0, [step, {"loss": step / 3}]) for step in range(10_000 - len(values) - 1)]
    written += [(1, [step, {"odd": value, "loss": 1.0}]) for step, value in enumerate(values)]
    log._kept.extend((rank, json.dumps(report).encode()) for rank, report in [*written, (3, [1, {}])])
    log._kept[5] = (0, b"no report")
    before, latest = log.read(), log.latest()
    assert len(before) == 10_000 - 1
    tracemalloc.start()
    try:
        log.finish()
        log.finish()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    assert (log.read(), log.latest()) == (before, latest)
    assert [type(report["odd"]) for report in log.read() if report.rank == 1] == [type(value) for value in values]


def test_sources_of_the_latest_cells_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", {})
    monkeypatch.setattr(by_value, "_sources", {})
    for number in range(by_value._MOST_SOURCES):
        by_value.take_source((f"<cell {number}>", f"x = {number}"))
    by_value.take_source(("<cell 0>", "x = 0"))  # it ran again
    by_value.take_source(("<cell new>", "x = 1"))
    assert linecache.getline("<cell 0>", 1) == "x = 0"
    assert (len(linecache.cache), linecache.getline("<cell 1>", 1)) == (by_value._MOST_SOURCES, "")
