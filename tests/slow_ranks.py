"""Ranks that are slowed, and runs in which none is: who is named, how soon, and who is not.

    python -m tests.slow_ranks slowed [times of each way] [ways]
    python -m tests.slow_ranks healthy [runs]
    python -m tests.slow_ranks cost [pairs]

A rank is slowed: by computing 10% longer, by a data loader in its own process or by a worker that is slower than the
steps, by neighbours on its CPU (as root, which may prefer them), each until ``mlaunch ps --json`` names it, with
``slow="5%"``; and by a stop of 2 s. Steps are mostly waits for a timer, as for a device, so that more ranks than CPUs
can be there. Each rank writes down how long its own part of each step took, so what is printed says by how much the
rank really was slower than the slowest of the others: on a busy machine another one may be, too.

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
import struct
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

RANKS = 3
CPUS = sorted(os.sched_getaffinity(0))
NEIGHBOURS = 1  # that the slowed rank has on its CPU
STEP = 0.1  # seconds
PATIENCE = 30.0  # seconds in which the slow rank is to be named
SLOWER = 0.1  # by that part of a step
WORK = 0.2  # the part of a step in which a rank computes
ALL_WAYS = ("computing", "loader", "worker", "neighbour", "stop")
OWN = "dd"  # seconds of a step that were the rank's own, and those in which it waited


def rest(seconds: float) -> None:
    signal.sigtimedwait([], seconds)


def burn(seconds: float) -> None:
    """Use the CPU for that long, whoever else does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Loaded(IterableDataset[int]):
    """Takes so much of a step for each item, or the longer time while the file has the word. ``step``: its seconds."""

    def __init__(self, file: Path, word: str, step: torch.Tensor, usual: float, longer: float) -> None:
        self._file, self._word, self._step, self._usual, self._longer = file, word, step, usual, longer

    def __iter__(self) -> Iterator[int]:
        while True:
            rest(self._step.item() * (self._longer if self._file.read_text() == self._word else self._usual))
            yield 0


def slowed_steps(place: str) -> None:
    """Take steps until told to end; in each look what is wanted of this rank."""
    rank = dist.get_rank()
    file, on = Path(place, str(rank)), torch.ones(1)
    step = torch.tensor(STEP).share_memory_()  # as long as it is here while nobody is slowed
    own = iter(DataLoader(Loaded(file, "loader", step, 0, SLOWER), batch_size=None))
    worker = iter(DataLoader(Loaded(file, "worker", step, 0.5, 1 + SLOWER), num_workers=1, batch_size=None))
    left = time.monotonic()
    while on.item():
        way = file.read_text()
        next(own)
        next(worker)
        os.sched_setaffinity(0, CPUS[:1] if way == "neighbour" else CPUS)
        rest(STEP * (1 - WORK))
        burn(STEP * WORK)
        burn(step.item() * SLOWER * (way == "computing"))
        if way == "stop":
            file.write_text("")
            os.kill(os.getpid(), signal.SIGSTOP)
        on[0] = not Path(place, "end").exists()
        entered = time.monotonic()
        dist.all_reduce(on, dist.ReduceOp.MIN)
        since, left = left, time.monotonic()
        with Path(place, f"{rank}.steps").open("ab") as log:
            log.write(struct.pack(OWN, entered - since, left - entered))
        if not way:
            step += (left - since - step) / 20


def slower(place: Path, rank: int, since: list[int]) -> float:
    """Return by which part of a step this rank's own time was longer than that of the slowest of the others.

    ``since``: the sizes of their logs.
    """
    means = []
    for number, size in enumerate(since):
        steps = list(struct.iter_unpack(OWN, (place / f"{number}.steps").read_bytes()[size:])) or [(0.0, 1.0)]
        means.append((statistics.fmean(own for own, _ in steps), statistics.fmean(map(sum, steps))))
    others = max(own for number, (own, _) in enumerate(means) if number != rank)
    return (means[rank][0] - others) / means[rank][1]


def facts(launch: str) -> dict[str, Any]:
    """Return what ``mlaunch ps --json`` has of slow ranks, in the call of this function."""
    told = json.loads(subprocess.check_output([sys.executable, "-m", "mlaunch", "ps", "--json"]))
    found: list[dict[str, Any]] = [one["features"].get("slow", {}) for one in told if launch in one["function"]]
    return found[0] if found else {}


def named(rank: int, way: str, since: float) -> float | None:
    """Return after how many seconds the rank was named; None: it was not in time."""
    passed = 0.0
    while passed < PATIENCE:
        said = facts("slowed_steps")
        passed = time.monotonic() - since
        if said.get("ranks") == str(rank) and (way != "stop" or "once" in said["text"]):
            return passed
        rest(0.5)
    return None


def pid_of(rank: int) -> int:
    told = json.loads(subprocess.check_output([sys.executable, "-m", "mlaunch", "ps", "--json"]))
    launch = next(one for one in told if "slowed_steps" in one["function"])
    return int(launch["ranks"][rank]["pid"])


def neighbour() -> subprocess.Popen[bytes]:
    """Start what uses the slowed rank's CPU, and is preferred to it."""
    command = ["nice", "-n", "-10", "taskset", "-c", str(CPUS[0]), sys.executable, "-S", "-c", "while True: pass"]
    started = subprocess.Popen(command, start_new_session=True)
    group = Path(f"/proc/{started.pid}/autogroup")
    if group.exists():  # then the kernel shares the CPU among sessions, and a process's own priority is its session's
        group.write_text("-10")
    return started


def slow_down(rank: int, way: str, place: Path) -> tuple[float | None, float]:
    """Slow a rank until it is named: return after how long it was, and by which part of a step it was slower."""
    pid, begun = pid_of(rank), time.monotonic()
    sizes = [(place / f"{one}.steps").stat().st_size for one in range(RANKS)]
    neighbours = [neighbour() for _ in range(NEIGHBOURS if way == "neighbour" else 0)]
    try:
        (place / str(rank)).write_text(way)
        if way == "stop":
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                rest(0.01)
            rest(2.0)
            os.kill(pid, signal.SIGCONT)
        found = named(rank, way, begun)
        return found, slower(place, rank, sizes)
    finally:  # also if somebody ends this: they would use the CPU for ever
        for process in neighbours:
            process.kill()
            process.wait()
        (place / str(rank)).write_text("")


def told_of(found: list[tuple[float | None, float]]) -> str:
    """Return how many were named, how soon, and by how much ranks were slower, those that were not named apart."""
    seconds, by = [one for one, _ in found if one is not None], [much for one, much in found if one is not None]
    missed = ", ".join(f"{much:.1%}" for one, much in found if one is None) or "none"
    soon, late, least, most = statistics.median(seconds or [0]), max(seconds or [0]), min(by or [0]), max(by or [0])
    return (
        f"{len(seconds)} of {len(found)} named within {PATIENCE:g} s, median {soon:.1f} s, most {late:.1f} s; they "
        f"were slower by {least:.1%} to {most:.1%} of a step, those that were not named by: {missed}"
    )


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
                    while running.is_alive() and "no rank makes" not in facts("slowed_steps").get("text", ""):
                        rest(0.5)
                    found.append(slow_down(number % RANKS, way, place))
                    print(f"{way}: {told_of(found[-1:])}", flush=True)
                print(f"{way}: {told_of(found)}", flush=True)
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
