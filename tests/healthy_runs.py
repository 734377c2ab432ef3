"""Slow but healthy runs: none of them is told to have stalled.

    python -m tests.healthy_runs [runs] [seconds of stall=]

A compile in a process of its own, an evaluation, a checkpoint, data loaders that work, a rank that is behind, slow
steps, a download, an upload, a poll, a service that takes 3 s to answer, a function that serves, and ``Ranks`` between
two calls, in turn. Each is slow for longer than ``stall=`` allows,
so it is looked at twice and judged; "judged" counts that.

100 runs with stall=1, on two cores beside a load of ten: judged 109 times, 0 accusations.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import mlaunch
from mlaunch import Ranks, launcher
from tests import launches

_SLOW = 3.5  # of what stall= says: two looks a second apart come within it


def burn(seconds: float) -> None:
    end, one = time.monotonic() + seconds, torch.ones(100, 100)
    while time.monotonic() < end:
        one @ one


def compile_elsewhere(seconds: float) -> None:
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)


def save(seconds: float) -> None:
    end, page = time.monotonic() + seconds, os.urandom(1 << 20)
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(page)
            os.fsync(file.fileno())


class Working(Dataset[int]):
    """Its worker takes that long for each item."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        burn(self._seconds)
        return index


def load(seconds: float) -> None:
    for _ in DataLoader(Working(seconds), num_workers=1):
        pass


def be_behind(seconds: float) -> None:
    if dist.get_rank() == 1:
        burn(seconds)
    dist.barrier()


def take_slow_steps(seconds: float) -> None:
    for _ in mlaunch.progress(range(5)):
        signal.sigtimedwait([], seconds / 5)


def talk(seconds: float, ours: Callable[[socket.socket], object], theirs: Callable[[socket.socket], object]) -> None:
    """Talks with a service, which a thread is, for so long."""
    here, there = socket.socketpair()
    end = time.monotonic() + seconds

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs(there)

    service = threading.Thread(target=serve)
    service.start()
    while time.monotonic() < end:
        ours(here)
    here.close()
    there.shutdown(socket.SHUT_RDWR)
    service.join()
    there.close()


def download(seconds: float) -> None:
    def send(to: socket.socket) -> None:
        signal_free_wait(0.1)
        to.sendall(bytes(3000))

    talk(seconds, lambda of: of.recv(1 << 20), send)


def upload(seconds: float) -> None:
    def read(of: socket.socket) -> None:
        signal_free_wait(0.05)
        if not of.recv(1 << 16):
            raise OSError

    talk(seconds, lambda to: to.sendall(bytes(1 << 16)), read)


def signal_free_wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def poll(seconds: float) -> None:
    for _ in range(int(seconds / 0.7) + 1):
        signal.sigtimedwait([], 0.7)


def ask_a_service(seconds: float) -> None:
    """Each answer takes longer than two looks are apart."""

    def answer(to: socket.socket) -> None:
        if not to.recv(1):
            raise OSError
        signal_free_wait(3.0)
        to.sendall(b"x")

    talk(seconds, lambda of: (of.sendall(b"x"), of.recv(1)), answer)


WORK = (burn, compile_elsewhere, save, load, be_behind, take_slow_steps, download, upload, poll, ask_a_service)


def work(slow: Callable[[float], None], seconds: float) -> None:
    for _ in mlaunch.progress(range(2)):
        dist.all_reduce(torch.ones(1))
    slow(seconds)
    dist.all_reduce(torch.ones(1))


def serve(seconds: float) -> None:
    signal.sigtimedwait([], seconds)


def rest(stall: float) -> None:
    with Ranks(n_gpus=2, stall=stall, progress=False) as ranks:
        ranks.run(work, serve, 0.0)
        signal.sigtimedwait([], _SLOW * stall)
        ranks.run(work, serve, 0.0)


@dataclass
class Judged:
    """What came of them."""

    runs: int = 0
    judged: int = 0
    accused: list[str] = field(default_factory=list)
    by_kind: collections.Counter[str] = field(default_factory=collections.Counter)


def healthy(runs: int, stall: float = 1.0) -> Judged:
    """Makes the runs, one after the other."""
    stall_signs = launches.signs_of_stalls()
    found, judge, accuse = Judged(), stall_signs.work, stall_signs.stalled

    def works(*looks: Any) -> bool:
        found.judged += 1
        return judge(*looks)

    def stalled(seconds: float, ranks: Any) -> str:
        found.accused.append(f"{kind}: {accuse(seconds, ranks)}")
        return accuse(seconds, ranks)

    kinds = [*(slow.__name__ for slow in WORK), "serve", "rest"]
    with mock.patch.object(stall_signs, "work", works), mock.patch.object(stall_signs, "stalled", stalled):
        for number in range(runs):
            kind = kinds[number % len(kinds)]
            if kind == "rest":
                rest(stall)
            elif kind == "serve":
                launcher(serve, 2, stall=stall, progress=False)(_SLOW * stall)
            else:
                launcher(work, 2, stall=stall, progress=False)(WORK[number % len(kinds)], _SLOW * stall)
            found.runs += 1
            found.by_kind[kind] += 1
    return found


def main(runs: int = 100, stall: float = 1.0) -> None:
    begun, found = time.monotonic(), healthy(runs, stall)
    print(f"{found.runs} runs ({dict(found.by_kind)}), judged {found.judged} times, {len(found.accused)} accusations, "
          f"in {time.monotonic() - begun:.0f} s", *found.accused, sep="\n")  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3]))
