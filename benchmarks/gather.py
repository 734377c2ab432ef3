"""all_gather of objects at 4 ranks, of which one passes a large array and the others small ones."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from benchmarks.measure import Row, alternate, compare
from mlaunch import launcher

_MIB = 256


def gather(how: str) -> float:
    """Seconds for the slowest rank."""
    import time

    import torch.distributed as dist

    from mlaunch import comm

    mine = numpy.ones(_MIB * 2**20 if comm.get_rank() == 1 else 100, dtype=numpy.uint8)
    everyone: list[Any] = [None] * 4
    comm.synchronize()
    start = time.perf_counter()
    if how == "comm":
        everyone = comm.all_gather(mine)
    else:
        dist.all_gather_object(everyone, mine)
    taken = time.perf_counter() - start
    if [len(one) for one in everyone] != [100, _MIB * 2**20, 100, 100]:
        raise RuntimeError("something was lost")
    return taken


def run(rounds: int) -> list[Row]:
    contestants = {
        "mlaunch.comm.all_gather": functools.partial(_slowest, "comm"),
        "torch all_gather_object": functools.partial(_slowest, "torch"),
    }
    medians = alternate(contestants, rounds)
    bounds = {"torch all_gather_object": ("mlaunch.comm.all_gather", ">= 2")}
    return compare(f"gather objects, one of {_MIB} MiB", medians, bounds, "s")


def _slowest(how: str) -> float:
    return max(launcher(gather, 4)(how))
