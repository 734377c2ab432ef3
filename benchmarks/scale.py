"""Ten thousand ranks: what joining, failing and a large machine cost; simulated machines speak the real protocol.

All sides share this machine's cores: the gate, the links of all machines, their ranks. A cluster has cores on each.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time

from benchmarks import operations, swarm, work
from benchmarks.measure import Row, seconds
from benchmarks.swarm import Size
from mlaunch import launcher
from mlaunch.compat.caller import Server

_SMALL, _LARGE, _MANY = Size(128, 8), Size(1024, 8), Size(1250, 8)
_MB = 10**6
_HERE = 512  # ranks on one machine


def run(rounds: int) -> list[Row]:
    return [*_small(rounds), *_large(), *_many(rounds), *_operations(), *_one_machine(rounds)]


def _small(rounds: int) -> list[Row]:
    through, directly = [], []
    for _ in range(rounds):
        directly.append(swarm.join_directly(_SMALL.world_size).ranks)
        one = swarm.join_through_links(_SMALL)
        through.append(one.machines + one.ranks)
    case, reference = "1,024 ranks on 128 machines", "directly at the store"
    ours, theirs = statistics.median(through), statistics.median(directly)
    return [
        Row(case, "join through links and gate", ours, "s", reference, ours / theirs, "<= 1.3"),
        Row(case, reference, theirs, "s"),
    ]


def _large() -> list[Row]:
    one, case = swarm.join_through_links(_LARGE), "8,192 ranks on 1,024 machines"
    return [
        Row(case, "join", one.machines + one.ranks, "s", bound="<= 10 s"),
        Row(case, "of that, the machines", one.machines, "s"),
        Row(case, "the gate's own work for the machines", one.gate[0], "s"),
        Row(case, "and for the ranks", one.gate[1], "s"),
        Row(case, "attempts to connect again", one.attempts - _LARGE.machines, "", bound="0"),
        Row(case, "descriptors in the gate", one.descriptors, "per machine", bound="<= 5"),
        Row(case, "memory in the gate", one.mib, "MiB", bound="<= 100"),
    ]


def _many(rounds: int) -> list[Row]:
    found = [swarm.fail(_MANY) for _ in range(rounds)]
    case = "1,250 machines"
    return [
        Row(case, "have their plan", statistics.median(one.machines for one in found), "s"),
        Row(case, "bytes from the gate until then", max(one.bytes for one in found) / _MB, "MB", bound="<= 5"),
        Row(case, "first failure to all", statistics.median(one.failure for one in found), "s", bound="<= 0.5 s"),
        Row(case, "the gate's own work for it", statistics.median(one.gate[1] for one in found), "s"),
        Row(case, "the same, 10 do not read", statistics.median(swarm.fail(_MANY, deaf=10).failure
                                                              for _ in range(rounds)), "s", bound="<= 0.5 s"),
    ]  # fmt: skip


# Operations


def _operations() -> list[Row]:
    rows = []
    swarm.prepare()
    with Server() as server:
        for size in (64, 256, 1024):
            counts = operations.of_joining(server.py_server_port, size)
            rows.append(Row(f"{size:,} ranks", "our operations at the store", statistics.mode(counts), "per rank",
                            bound="the same number"))  # fmt: skip
    return rows


# One machine


def _failed(size: int) -> float:
    start = time.perf_counter()
    with contextlib.suppress(ValueError):
        launcher(work.raise_on, size, oversubscribe=True)(size // 2)
    return time.perf_counter() - start


def _one_machine(rounds: int) -> list[Row]:
    rows = []
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # a full mesh of 512 would be 130,000 connections
    try:
        for size in (8, 64, _HERE):
            call, case = launcher(os.getpid, size, oversubscribe=True), f"{size} ranks on one machine"
            call()
            warm = statistics.median(seconds(call) for _ in range(rounds if size > 8 else 20 * rounds))
            failed = statistics.median(_failed(size) for _ in range(rounds))
            bound = "<= 20 ms" if size == _HERE else ""
            rows.append(Row(case, "warm call and values, for each", warm / size, "s", bound=bound))
            rows.append(Row(case, "failure and stop, for each", failed / size, "s"))
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]
    return rows
