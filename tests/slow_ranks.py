"""Ranks that are slowed, and runs in which none is: who is named, how soon, and who is not.

    python -m tests.slow_ranks slowed [times of each way] [ways]
    python -m tests.slow_ranks healthy [runs]
    python -m tests.slow_ranks cost [pairs]

A rank is slowed: by computing 10% longer, by a data loader that is slower than the steps, by neighbours on its CPU (as
root, which may prefer them), each until ``mlaunch ps --json`` names it, with ``slow="5%"``; and by a stop of 2 s. Steps
are mostly waits for a timer, as for a device, so that more ranks than CPUs can be there.

Healthy runs are of ten kinds, each with ``slow="10%"``; the time over which ranks are compared is 10 s, not 30, which
is harder on chance.

Cost: the same steps of 10 ms with and without the option, in turn.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from mlaunch import launcher
from tests import launches

RANKS = 4
CPUS = sorted(os.sched_getaffinity(0))
NEIGHBOURS = 4  # that the slowed rank has on its CPU
STEP = 0.1  # seconds
PATIENCE = 30.0  # seconds in which the slow rank is to be named
SLOWER = 0.1  # by that part of a step
WORK = 0.05  # the part of a step in which a rank computes
ALL_WAYS = ("computing", "loader", "neighbour", "stop")


def rest(seconds: float) -> None:
    signal.sigtimedwait([], seconds)


def burn(seconds: float) -> None:
    """Use the CPU for that long, whoever else does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Loaded(IterableDataset[int]):
    """Its worker takes half of a step for each item, or one and a half, as the file says."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __iter__(self) -> Iterator[int]:
        while True:
            rest(STEP * (1.5 if Path(self._file).read_text() == "loader" else 0.5))
            yield 0


def slowed_steps(place: str) -> None:
    """Take steps until told to end; in each look what is wanted of this rank."""
    rank = dist.get_rank()
    file, on = Path(place, str(rank)), torch.ones(1)
    loader = iter(DataLoader(Loaded(str(file)), num_workers=1, batch_size=None))
    while on.item():
        way = file.read_text()
        next(loader)
        os.sched_setaffinity(0, CPUS[:1] if way == "neighbour" else CPUS)
        rest(STEP * (1 - WORK))
        burn(STEP * (WORK + SLOWER * (way == "computing")))
        if way == "stop":
            file.write_text("")
            os.kill(os.getpid(), signal.SIGSTOP)
        on[0] = not Path(place, "end").exists()
        dist.all_reduce(on, dist.ReduceOp.MIN)


def facts(launch: str) -> dict[str, Any]:
    """Return what ``mlaunch ps --json`` has of slow ranks, in the call of this function."""
    told = json.loads(subprocess.check_output([sys.executable, "-m", "mlaunch", "ps", "--json"]))
    found: list[dict[str, Any]] = [one["features"].get("slow", {}) for one in told if launch in one["function"]]
    return found[0] if found else {}


def named(rank: int, way: str, since: float) -> float | None:
    """Return after how many seconds the rank was named; None: it was not in time."""
    while (passed := time.monotonic() - since) < PATIENCE:
        said = facts("slowed_steps")
        if said.get("ranks") == str(rank) and (way != "stop" or "once" in said["text"]):
            return passed
        rest(0.5)
    return None


def pid_of(rank: int) -> int:
    told = json.loads(subprocess.check_output([sys.executable, "-m", "mlaunch", "ps", "--json"]))
    launch = next(one for one in told if "slowed_steps" in one["function"])
    return int(launch["ranks"][rank]["pid"])


def slow_down(rank: int, way: str, place: Path) -> float | None:
    """Slow a rank until it is named."""
    pid, begun = pid_of(rank), time.monotonic()
    count = NEIGHBOURS if way == "neighbour" else 0
    command = ["nice", "-n", "-5", "taskset", "-c", str(CPUS[0]), sys.executable, "-S", "-c", "while True: pass"]
    neighbours = [subprocess.Popen(command) for _ in range(count)]
    try:
        (place / str(rank)).write_text(way)
        if way == "stop":
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                rest(0.01)
            rest(2.0)
            os.kill(pid, signal.SIGCONT)
        return named(rank, way, begun)
    finally:  # also if somebody ends this: they would use the CPU for ever
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        (place / str(rank)).write_text("")


def slowed(times: int, *ways: str) -> None:
    """Slow one rank after the other, each way so often; between two wait until nobody is named."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        place = Path(directory)
        for rank in range(RANKS):
            (place / str(rank)).write_text("")
        launches.hurry_slow(patch, 10.0)
        call = launcher(slowed_steps, RANKS, device_type="cpu", slow="5%", progress=False)
        running = threading.Thread(target=call, args=(directory,))
        running.start()
        try:
            for way in ways or ALL_WAYS:
                found = []
                for number in range(times):
                    while "for no rank" not in facts("slowed_steps").get("text", ""):
                        rest(0.5)
                    found.append(slow_down(number % RANKS, way, place))
                seconds = [one for one in found if one is not None]
                median, most = statistics.median(seconds or [0]), max(seconds or [0])
                print(f"{way}: {len(seconds)} of {times} named within {PATIENCE:g} s, median {median:.1f} s, most "
                      f"{most:.1f} s", flush=True)  # fmt: skip
        finally:
            (place / "end").touch()
            running.join()


# Healthy runs: each takes steps of some kind until it is told to end.


def collectives(_number: int) -> None:
    rest(STEP)
    dist.all_reduce(torch.ones(8))


def several(_number: int) -> None:
    for _ in range(5):
        rest(STEP / 5)
        dist.all_reduce(torch.ones(100))
        dist.all_gather([torch.ones(1)] * dist.get_world_size(), torch.ones(1))


def unequal(number: int) -> None:
    """Sequences of different lengths: each step another rank is last."""
    rest(STEP * random.Random(number * 16 + dist.get_rank()).uniform(0.5, 1.5))
    dist.all_reduce(torch.ones(8))


def one_sided(number: int) -> None:
    rest(STEP)
    dist.broadcast(torch.ones(1000), number % dist.get_world_size())
    dist.all_reduce(torch.ones(8))


def checkpoint(number: int) -> None:
    """Rank 0 writes one, which takes 2 s, while the others wait."""
    if number == 60 and dist.get_rank() == 0:
        rest(2.0)
    collectives(number)


def evaluation(number: int) -> None:
    """All evaluate for some seconds without a collective."""
    if number == 50:
        rest(3.0)
    collectives(number)


def behind(_number: int) -> None:
    """Operations that overlap with computing."""
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    rest(STEP)
    work.wait()


def pipeline(_number: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.recv(torch.ones(8), rank - 1)
    rest(STEP)
    if rank < size - 1:
        dist.send(torch.ones(8), rank + 1)


def alone(_number: int) -> None:
    """Nobody waits for anybody."""
    rest(STEP * (1 + dist.get_rank()))


_models: list[Any] = []


def model(_number: int) -> None:
    _models[:] = _models or [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))]
    rest(STEP)
    _models[0](torch.ones(4, 8)).sum().backward()


KINDS: tuple[Callable[[int], None], ...] = (
    collectives, several, unequal, one_sided, checkpoint, evaluation, behind, pipeline, alone, model,
)  # fmt: skip


def healthy_steps(step: Callable[[int], None], seconds: float) -> None:
    torch.set_num_threads(1)
    ends, number, is_over = time.monotonic() + seconds, 0, False
    while not is_over:
        step(number)
        number += 1
        is_over = number % 10 == 0 and time.monotonic() >= ends
        if number % 10 == 0 and step is not alone:
            ending = torch.tensor(float(is_over))
            dist.all_reduce(ending)
            is_over = bool(ending.item())


def healthy(runs: int, seconds: float = 16.0) -> None:
    found, alarms = collections.Counter[str](), []
    with pytest.MonkeyPatch.context() as patch:
        launches.hurry_slow(patch, 10.0)
        for number in range(runs):
            step = KINDS[number % len(KINDS)]
            call = launcher(healthy_steps, RANKS, device_type="cpu", slow="10%", progress=False)
            call(step, seconds + 8 * (step is model))  # which imports for seconds
            found[step.__name__] += 1
            if call.last is not None and call.last.slow_ranks is not None:
                alarms.append(f"{step.__name__}: {call.last.slow_ranks}")
    print(f"{runs} healthy runs {dict(found)}: {len(alarms)} alarms", *alarms, sep="\n")


def timed_steps(steps: int) -> tuple[float, float]:
    """Return the median time of a step that waits 10 ms for a device, with four collectives; and its CPU time."""
    torch.set_num_threads(1)
    found, tensor, spent = [], torch.ones(1000), time.process_time()
    for _ in range(steps):
        begun = time.perf_counter()
        rest(0.01)
        for _ in range(4):
            dist.all_reduce(tensor)
        found.append(time.perf_counter() - begun)
    return statistics.median(found), (time.process_time() - spent) / steps


def cost(pairs: int) -> None:
    """The option's, on two ranks, alternating."""
    found: dict[str | None, list[tuple[float, float]]] = {None: [], "10%": []}
    for _ in range(pairs):
        for given, measured in found.items():
            call = launcher(timed_steps, 2, device_type="cpu", slow=given, progress=False)
            measured.extend(call(600))
    for what, index in (("takes", 0), ("uses the CPU for", 1)):
        without, with_it = (statistics.median(one[index] for one in measured) * 1e6 for measured in found.values())
        print(f"a step of 10 ms with four collectives {what} {without:.0f} us, with slow= {with_it:.0f} us "
              f"({(with_it - without) / 1e4:+.2%} of 10 ms)")  # fmt: skip


PROOFS: dict[str, Callable[..., None]] = {"slowed": slowed, "healthy": healthy, "cost": cost}

if __name__ == "__main__":
    PROOFS[sys.argv[1]](int(sys.argv[2]) if sys.argv[2:] else 20, *sys.argv[3:])
