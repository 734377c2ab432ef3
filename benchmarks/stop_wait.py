"""How long a rank waits for the decision on a step at which all stop: ``mlaunch.stopping()`` waits while all are asked.

    python -m benchmarks.stop_wait [requests]

On one machine; on two machines of an engine, whose members are threads here; and on two machines that are started one
by one, of which the second has so many milliseconds to the gate and back. Ranks take steps of 0.2 ms and are not in
step with each other. The longest of a rank's last looks counts, so what else keeps a rank from running counts, too.
Milliseconds: median, nine of ten, longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlaunch
from mlaunch import Ranks, launcher
from mlaunch.rendezvous.address import listen
from tests.contract.test_engine_calls import Threads

_STEP = 2e-4  # seconds
_LAST = 64  # looks: the one that waits is among them
_LATEST = 0.02  # seconds in which the request comes
_DELAYS = (0.005, 0.02)  # seconds on each way
_PATIENCE = 60.0


def work(marker: str = "") -> float:
    """Returns the seconds that the longest of the last looks took. ``marker``: a file to make after the first ones."""
    took: deque[float] = deque(maxlen=_LAST)
    end = time.perf_counter() + _PATIENCE
    while time.perf_counter() < end:
        signal.sigtimedwait([], _STEP)
        begun = time.perf_counter()
        reason = mlaunch.stopping()
        took.append(time.perf_counter() - begun)
        if marker and len(took) == _LAST:
            Path(marker).touch()
            marker = ""
        if reason:
            return max(took)
    raise TimeoutError("no request has come")


def on_ranks(requests: int, **options: Any) -> list[float]:
    """Asks ranks that stay."""
    found: list[float] = []
    with Ranks(n_gpus=2, **options) as ranks:
        for number in range(requests):
            future = ranks.submit(work)
            signal.sigtimedwait([], _LATEST * (1 + number % 10) / 10)
            while not ranks.stop() and not future.done():  # it has not begun
                os.sched_yield()
            found += future.result(_PATIENCE)
    return found


def by_hand(requests: int, delay: float) -> list[float]:
    """Starts two machines for each request, the second behind a slow link."""
    found: list[float] = []
    for _ in range(requests):
        with listen() as listener:
            port = listener.getsockname()[1]
        options: dict[str, Any] = {"world_size": 2, "token": "hush" * 8, "deadline": _PATIENCE, "progress": False}
        with (
            tempfile.TemporaryDirectory() as folder,
            slow_link(port, delay) as slow,
            asking(marker := Path(folder, "looks")),
            ThreadPoolExecutor(1) as pool,
        ):
            other = pool.submit(launcher(work, 1, rank_start=1, port=slow, **options), str(marker))
            found += launcher(work, 1, stop_on="USR1", port=port, **options)()
            found += other.result()
    return found


@contextlib.contextmanager
def asking(marker: Path) -> Iterator[None]:
    """Asks this process by a signal once the marker is there."""
    over = threading.Event()

    def ask() -> None:
        while not (marker.exists() or over.wait(_LATEST)):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def slow_link(port: int, delay: float) -> Iterator[int]:
    """Listens; what comes goes to the port later by so many seconds, and what that answers comes back as late."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

    async def serve() -> None:
        server = await asyncio.start_server(take, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def tell(name: str, seconds: Sequence[float]) -> None:
    tenths = statistics.quantiles(seconds, n=10)
    shown = ", ".join(f"{1e3 * value:.2f}" for value in (statistics.median(seconds), tenths[-1], max(seconds)))
    print(f"{name}: {shown} ms ({len(seconds)} waits)", flush=True)


def main(requests: int = 200) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of a launch that is over
    tell("one machine", on_ranks(requests))
    tell("two machines of an engine", on_ranks(requests, engine=Threads()))
    for delay in _DELAYS:
        tell(f"two machines, {2e3 * delay:g} ms there and back", by_hand(max(5, requests // 20), delay))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
