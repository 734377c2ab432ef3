"""What one more idle rank costs, in PSS."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.measure import Row
from mlaunch import launcher


def pss() -> float:
    """This process's proportional share of memory, in MiB."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not tell the PSS")


def idle() -> float:
    dist.barrier()
    value = pss()
    dist.barrier()
    return value


def _spawned(rank: int, size: int, port: int, queue: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    queue.put(idle())
    dist.destroy_process_group()


def _total(size: int) -> float:
    return sum(launcher(idle, size)())


def _spawned_total(size: int) -> float:
    import torch.multiprocessing

    from benchmarks.work import free_port

    queue = multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_spawned, (size, free_port(), queue), nprocs=size)
    return float(sum(queue.get() for _ in range(size)))


def run(rounds: int) -> list[Row]:
    del rounds  # pages are counted, not timed
    ours = (_total(8) - _total(4)) / 4
    theirs = (_spawned_total(8) - _spawned_total(4)) / 4
    case = "PSS of one more idle rank"
    return [
        Row(case, "mlaunch", ours, "MiB", "spawn", ours / theirs, "<= 0.33"),
        Row(case, "spawn", theirs, "MiB"),
    ]
