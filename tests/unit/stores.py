"""Stores in processes of their own, forked from the tests', which have imported torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

from mlaunch.base import linux
from mlaunch.machines.gate import GateConfig, GateProcess
from mlaunch.machines.link import RankStreams
from mlaunch.machines.wire import control_protocol
from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_server import LocalStore
from mlaunch.rendezvous.tcp_store import serve


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[None]:
    """A process that works beside this one."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        linux.die_with(parent)
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def store_of_a_launch() -> Iterator[int]:
    """A gate and a link, each in its process, as in a launch; yields where the ranks find the store."""
    with listen() as public, listen() as listener:
        gate = GateProcess(GateConfig(public, "launch", None, 60.0))
        try:
            with forked(lambda: asyncio.run(carry(public.getsockname()[1], listener))):
                yield listener.getsockname()[1]
        finally:
            gate.kill()
            gate.reap()


@contextlib.contextmanager
def store_of_torch() -> Iterator[int]:
    def work() -> None:
        tcp_store.look_up_in_files_only()
        store = serve(listener)
        while store is not None:
            signal.pause()

    with listen() as listener, forked(work):
        yield listener.getsockname()[1]


@contextlib.contextmanager
def store_of_one_machine() -> Iterator[int]:
    """As an agent hosts it. Not in this process: torch's client keeps the interpreter to itself while it connects."""

    def work() -> None:
        store = LocalStore(listener)
        while store is not None:
            signal.pause()

    with listen() as listener, forked(work):
        yield listener.getsockname()[1]


async def carry(gate: int, listener: socket.socket) -> None:
    async with control_protocol.dialled(LOOPBACK, gate, "store", None) as streams:
        await RankStreams().serve(listener, streams)
