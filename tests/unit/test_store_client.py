"""What a rank's joining costs at the store, and who is said to be missing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.operations import clients, of_joining
from mlaunch.base.text import name_some_ranks
from mlaunch.machines.gate import gate
from mlaunch.rendezvous.store_keys import StoreKeys
from tests.unit.stores import store_of_a_launch, store_of_torch


@pytest.fixture(scope="module", params=[store_of_torch, store_of_a_launch])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with request.param() as port:
        yield port


@pytest.mark.slow
def test_joining_takes_as_many_operations_whatever_the_size(port: int) -> None:
    for size in (4, 64, 256):
        asked = Counter(of_joining(port, size))
        # With a torch whose stores have no ``barrier``: three, and one more of who tells that all are there.
        assert asked == ({2: size} if hasattr(dist.TCPStore, "barrier") else {3: size - 1, 4: 1})


def test_one_rank_looks_for_those_missing_and_tells_all(port: int) -> None:
    ranks = clients(port, "missing", 64)
    for number, client in enumerate(ranks):
        client.arrive(number)
    with ThreadPoolExecutor(64) as pool:
        told = set(pool.map(lambda client: client.missing(100_000), ranks))
    assert told == {"ranks 64-99999"}
    assert max(client.store.counts.total() for client in ranks) == 6  # with its arrival
    assert sum(client.store.counts["get"] for client in ranks) == 64 + 1


def test_nobody_is_missing(port: int) -> None:
    [client] = clients(port, "all", 1)
    client.arrive(0)
    assert client.missing(1) == ""


def test_many_that_are_missing_are_a_short_text() -> None:
    assert name_some_ranks([3]) == "rank 3"
    assert name_some_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    told = name_some_ranks(range(0, 10_000, 2))
    assert told.startswith("ranks 0, 2, 4, ")
    assert told.endswith(", 38 and 4980 more")


def test_a_machine_that_does_not_read_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it is answered would fill the memory of the gate."""
    done: list[str] = []

    class Crowded:
        unsent = 1

        def __init__(self, *_: object) -> None:
            """Needs no connection."""

        def send(self, stream: int, _data: bytes) -> None:
            done.append(f"answers {stream}")

        async def drained(self) -> None:
            done.append("waits")

        async def received(self) -> AsyncIterator[tuple[int, bytes]]:
            for stream in range(2):
                done.append(f"hears {stream}")
                yield stream, b"\xff"  # which no client of torch's store says

    monkeypatch.setattr(gate, "Pieces", Crowded)
    nobody: Any = None
    asyncio.run(gate.serve_store(StoreKeys(), nobody, nobody))
    assert done == ["hears 0", "answers 0", "waits", "hears 1", "answers 1", "waits"]
