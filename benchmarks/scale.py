"""Ten thousand ranks: what joining, failing and a large machine cost; simulated machines speak the real protocol.

All sides share this machine's cores: the gate, the links of all machines, their ranks. A cluster has cores on each.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections import Counter
from datetime import timedelta
from typing import Any

from benchmarks import swarm
from benchmarks.measure import Row, seconds
from benchmarks.swarm import Size
from mlaunch import launcher
from mlaunch.rendezvous import names
from mlaunch.rendezvous.address import LOOPBACK
from mlaunch.rendezvous.server import Server
from mlaunch.rendezvous.store_client import StoreClient

_SMALL, _LARGE, _MANY = Size(128, 8), Size(1024, 8), Size(1250, 8)
_MIB, _MB = 2**20, 10**6
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
        Row(case, "the same, 10 do not read", statistics.median(swarm.fail(_MANY, deaf=10).failure
                                                              for _ in range(rounds)), "s", bound="<= 0.5 s"),
    ]  # fmt: skip


# Operations


class _Counting:
    """Counts the operations that it passes on to a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)


def _operations() -> list[Row]:
    rows = []
    with Server() as server:
        for size in (64, 256, 1024):
            counts = _joining(server.py_server_port, size)
            rows.append(Row(f"{size:,} ranks", "our operations at the store", statistics.mode(counts), "per rank",
                            bound="the same number"))  # fmt: skip
    return rows


def _joining(port: int, size: int) -> list[int]:
    swarm.open_files()
    with names.from_files_only():
        ranks = [StoreClient(LOOPBACK, port, f"of {size}", timedelta(seconds=60)) for _ in range(size)]
    for number, client in enumerate(ranks):
        client.store = _Counting(client.store)
        client.arrive(number)
    for client, turn in [(client, client.begin("joined", size)) for client in ranks]:
        client.end(turn)
    return [client.store.counts.total() for client in ranks]


# One machine


def _value() -> int:
    return os.getpid()


def _raise(culprit: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == culprit:
        raise ValueError("the culprit's")
    dist.barrier()


def _one_machine(rounds: int) -> list[Row]:
    rows = []
    for size in (8, 64, _HERE):
        backend = "fake" if size == _HERE else "gloo"
        call = launcher(_value, size, backend=backend)
        call()
        median = statistics.median(seconds(call) for _ in range(rounds if size > 8 else 20 * rounds))
        gc.collect()
        bound = "<= 20 ms per rank" if size == _HERE else "not slower than before" if size == 8 else ""
        case = f"{size} ranks on one machine, {backend}"
        rows.append(Row(case, "warm call and values", median, "s", bound=bound))
        rows.append(Row(case, "for each rank", median / size, "s"))
    return rows
