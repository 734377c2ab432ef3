"""Simulated machines: real links as tasks of a few processes, and their ranks, real clients of the store, in others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mlaunch.base.exceptions import RankFailure
from mlaunch.compat.caller import Server
from mlaunch.machines.gate import GateConfig, GateProcess, run_in_loop
from mlaunch.machines.link import LinkProcess
from mlaunch.machines.wire import Join, Planned
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import Rendezvous
from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_client import StoreClient

TOKEN = "benchmark"
PROCESSES = 2  # that links share, and that ranks share
_CONTEXT = multiprocessing.get_context("spawn")
_LIMIT = 300.0  # seconds
_RECEIVED = slice(128, 136)  # where TCP_INFO has the bytes that came


@dataclass(frozen=True)
class Size:
    """How many simulated machines there are, and ranks on each."""

    machines: int
    ranks: int

    @property
    def world_size(self) -> int:
        return self.machines * self.ranks


@dataclass
class Seen:
    """What the links of a process have seen of joining."""

    attempts: int = 0
    bytes: int = 0
    ports: dict[int, int] = field(default_factory=dict)  # machine -> where its link listens


def prepare() -> None:
    """Allows this process as many descriptors as it may have. Its collector is off, as in what a fork server forks."""
    gc.disable()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def gate() -> Iterator[tuple[GateProcess, tuple[str, int]]]:
    """Runs the process of gate and store; yields it and the gate's address."""
    prepare()
    with listen() as public:
        server = GateProcess(GateConfig(public, "launch", TOKEN, 60.0))
        address = public.getsockname()
    try:
        yield server, address
    finally:
        server.kill()
        server.reap()


@contextlib.contextmanager
def started(work: Callable[..., None], shares: Sequence[Any]) -> Iterator[list[Any]]:
    """Runs ``work(end, share)`` in a process for each share; yields our ends of pipes, once all are ready."""
    ends, processes = [], []
    for share in shares:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=work, args=(theirs, share), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    for end in ends:
        end.recv()
    try:
        yield ends
    finally:
        for process in processes:
            process.kill()
            process.join()


def private_mib(pid: int) -> float:
    """Returns the memory that a process shares with nobody."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


def worked(pid: int) -> float:
    """Returns the seconds that a process has had a core."""
    user, system = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# Links


class _CountingLink(LinkProcess):
    seen: Seen

    async def _connect(self) -> asyncio.StreamReader:
        self.seen.attempts += 1
        return await super()._connect()

    def stop_reading(self) -> None:
        """Makes it a machine that is silent in both directions, as one that hangs."""
        if self._writer is not None:
            self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def received(self) -> int:
        """Returns the bytes that came from the gate."""
        if self._writer is None:
            return 0
        end: socket.socket = self._writer.get_extra_info("socket")
        (count,) = struct.unpack("=Q", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_RECEIVED])
        return int(count)


def links(end: Any, share: tuple[Size, tuple[str, int], range]) -> None:
    """Runs the links of some machines. Tells what they have seen when all have their plan."""
    prepare()
    run_in_loop(_links(end, *share))


async def _links(end: Any, size: Size, address: tuple[str, int], numbers: range) -> None:
    seen, loop = Seen(), asyncio.get_running_loop()
    cluster = Rendezvous(*address, TOKEN, join_timeout=_LIMIT, heartbeat_timeout=60.0)
    machines = {number: _machine(cluster, size, number, seen) for number in numbers}
    agents = {number: _Agent(agent) for number, (_, _, agent) in machines.items()}
    end.send("ready")
    await loop.run_in_executor(None, end.recv)
    tasks = [asyncio.ensure_future(link.run(listener)) for link, listener, _ in machines.values()]
    await asyncio.gather(*(agent.planned.wait() for agent in agents.values()))
    seen.bytes = sum(link.received() for link, _, _ in machines.values())
    end.send(seen)
    fails, deaf = await loop.run_in_executor(None, end.recv)
    for number in deaf:
        machines[number][0].stop_reading()
    if fails in agents:
        agents[fails].channel.send(RankFailure(fails, 1, "raised ValueError: no such luck", traceback="x" * 4_000))
    await asyncio.gather(*(agent.failed.wait() for number, agent in agents.items() if number not in {fails, *deaf}))
    end.send("heard")
    await asyncio.gather(*tasks)


def _machine(cluster: Rendezvous, size: Size, number: int, seen: Seen) -> tuple[_CountingLink, socket.socket, Channel]:
    listener = listen()
    seen.ports[number] = listener.getsockname()[1]
    agent, theirs = Channel.pair()
    host, first = f"host-number-{number}.of-a-cluster", number * size.ranks
    join = Join(host, first, size.ranks, size.world_size, "train()", "0.1", "2.13.0", 0)
    link = _CountingLink(cluster, join, theirs)
    link.seen = seen
    return link, listener, agent


class _Agent:
    """What a link tells its agent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.planned, self.failed = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._hear)

    def _hear(self) -> None:
        record, _ = self.channel.receive()
        if isinstance(record, Planned):
            self.planned.set()
        elif isinstance(record, RankFailure):
            self.failed.set()


# Ranks


def ranks(end: Any, world_size: int) -> None:
    """Brings a process's share of the ranks, by number and port, to the store, where they meet twice. Tells then.

    Each rank is a thread, which waits for its number.
    """
    prepare()
    tcp_store.look_up_in_files_only()
    sys.setswitchinterval(_LIMIT)  # thousands that wait for the interpreter would wake each 5 ms to ask for it
    numbers: SimpleQueue[tuple[int, int]] = SimpleQueue()
    met: SimpleQueue[StoreClient] = SimpleQueue()

    def live() -> None:
        rank, port = numbers.get()
        client = StoreClient(LOOPBACK, port, "launch", timedelta(seconds=_LIMIT))
        client.arrive(rank)
        for key in ("first", "second"):
            client.meet(key, world_size)
        met.put(client)

    for _ in range(world_size // PROCESSES):
        threading.Thread(target=live, daemon=True).start()
    end.send("ready")
    ports: dict[int, int] = end.recv()
    for number in ports.items():
        numbers.put(number)
    clients = [met.get() for _ in ports]
    end.send("met")
    end.recv()
    del clients


@dataclass(frozen=True)
class Joined:
    """What it took: seconds for the machines, and for the ranks after them; and what was seen."""

    machines: float
    ranks: float
    attempts: int = 0
    bytes: int = 0
    descriptors: float = 0.0
    mib: float = 0.0
    failure: float = 0.0  # seconds until the last machine had heard of the first failure
    gate: tuple[float, float] = (0.0, 0.0)  # seconds of a core that the gate took, for the machines and after them


def _dealt(things: Sequence[int]) -> list[Sequence[int]]:
    return [things[index::PROCESSES] for index in range(PROCESSES)]


def _meet(clients: list[Any], ports: dict[int, int]) -> float:
    start = time.perf_counter()
    for end, numbers in zip(clients, _dealt(list(ports)), strict=True):
        end.send({number: ports[number] for number in numbers})
    for end in clients:
        end.recv()
    return time.perf_counter() - start


def join_through_links(size: Size) -> Joined:
    """All machines join at the gate, then all ranks meet twice through their links."""
    numbers = [range(index, size.machines, PROCESSES) for index in range(PROCESSES)]
    with (
        gate() as (server, address),
        started(links, [(size, address, own) for own in numbers]) as machines,
        started(ranks, [size.world_size] * PROCESSES) as clients,
    ):
        before, work = (private_mib(server.pid), descriptors(server.pid)), [worked(server.pid)]
        start = time.perf_counter()
        for end in machines:
            end.send("go")
        seen: list[Seen] = [end.recv() for end in machines]
        joined = time.perf_counter() - start
        work.append(worked(server.pid))
        where = {number: port for one in seen for number, port in one.ports.items()}
        met = _meet(clients, {rank: where[rank // size.ranks] for rank in range(size.world_size)})
        held = (descriptors(server.pid) - before[1]) / size.machines
        share = work[1] - work[0], worked(server.pid) - work[1]
        return Joined(joined, met, sum(one.attempts for one in seen), sum(one.bytes for one in seen), held,
                      private_mib(server.pid) - before[0], gate=share)  # fmt: skip


def fail(size: Size, deaf: int = 0) -> Joined:
    """All machines join, and the last one fails, while some do not read."""
    numbers = [range(index, size.machines, PROCESSES) for index in range(PROCESSES)]
    with gate() as (server, address), started(links, [(size, address, own) for own in numbers]) as machines:
        start, work = time.perf_counter(), [worked(server.pid)]
        for end in machines:
            end.send("go")
        seen: list[Seen] = [end.recv() for end in machines]
        work.append(worked(server.pid))
        joined, start = time.perf_counter() - start, time.perf_counter()
        for end, own in zip(machines, numbers, strict=True):
            end.send((size.machines - 1, [number for number in range(deaf) if number in own]))
        for end in machines:
            end.recv()
        failed, share = time.perf_counter() - start, (work[1] - work[0], worked(server.pid) - work[1])
    return Joined(
        joined, 0.0, sum(one.attempts for one in seen), sum(one.bytes for one in seen), failure=failed, gate=share
    )


def join_directly(world_size: int) -> Joined:
    """All ranks meet twice at torch's store itself, on loopback, which knows no machines and no token."""
    prepare()
    with Server() as server, started(ranks, [world_size] * PROCESSES) as clients:
        return Joined(0.0, _meet(clients, dict.fromkeys(range(world_size), server.py_server_port)))
