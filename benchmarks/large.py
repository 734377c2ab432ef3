"""One GiB out of each of two ranks, and one GiB into each of four."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Row, alternate, compare, seconds
from benchmarks.work import floor, make_gib
from mlaunch import launcher

_GIB = 2**30


def make_and_return() -> tuple[torch.Tensor, float]:
    tensor = make_gib()
    dist.barrier()
    return tensor, time.perf_counter()  # CLOCK_MONOTONIC: one for all processes


def _put(queue: Any, barrier: Any, reader: Any) -> None:
    tensor = make_gib().numpy()
    barrier.wait()
    queue.put((tensor, time.perf_counter()))
    reader.wait()


def _returned() -> float:
    values = launcher(make_and_return, 2)()
    end = time.perf_counter()
    return end - max(start for _, start in values)


def _queued() -> float:
    context = multiprocessing.get_context("spawn")  # a fork of this process, in which torch has worked, may hang
    queue, barrier, done = context.Queue(), context.Barrier(2), context.Event()
    processes = [context.Process(target=_put, args=(queue, barrier, done)) for _ in range(2)]
    for process in processes:
        process.start()
    values = [queue.get() for _ in processes]
    end = time.perf_counter()
    done.set()
    for process in processes:
        process.join()
    return end - max(start for _, start in values)


def look(tensor: torch.Tensor) -> int:
    """Reads all of the argument; rank 0 measures what it cost all of us."""
    if float(tensor[::1024].sum()) != tensor.numel() / 1024:
        raise RuntimeError("the argument came through changed")
    dist.barrier()
    used = _used_bytes() if dist.get_rank() == 0 else 0
    dist.barrier()
    return used


def _used_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return fields["AnonPages"] + fields["Shmem"] + fields["PageTables"]


def touch(tensor: torch.Tensor) -> float:
    return float(tensor[0])


def results(rounds: int) -> list[Row]:
    with floor() as measure:
        names: dict[str, Callable[[], float]] = {
            "mlaunch": _returned,
            "one copy to fresh memory": lambda: measure("copy", 2),
            "multiprocessing.Queue": _queued,
        }
        bounds = {"mlaunch": ("one copy to fresh memory", "<= 1.3"), "multiprocessing.Queue": ("mlaunch", ">= 4")}
        return compare("1 GiB from each of 2 ranks", alternate(names, rounds), bounds, "s")


def arguments(rounds: int) -> list[Row]:
    tensor = make_gib()
    give, read = launcher(touch, 4), launcher(look, 4)
    with floor() as measure:
        names: dict[str, Callable[[], float]] = {
            "mlaunch": lambda: seconds(lambda: give(tensor)),
            "one copy to fresh memory": lambda: measure("copy", 1),
            "mlaunch, all read by all": lambda: seconds(lambda: read(tensor)),
        }
        medians = alternate(names, rounds)
    rows = compare("1 GiB to 4 ranks", medians, {"mlaunch": ("one copy to fresh memory", "<= 1.4")}, "s")
    used = {"with": lambda: float(read(tensor)[0]), "without": lambda: float(read(torch.ones(1024))[0])}
    memory = alternate(used, rounds)
    growth = (memory["with"] - memory["without"]) / _GIB
    return [*rows, Row("1 GiB to 4 ranks", "memory growth", growth, "GiB", "", None, "<= 1.15")]
