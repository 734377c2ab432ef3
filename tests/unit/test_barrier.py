"""A barrier on stores of every kind, also after some have given up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mlaunch.compat.caller import Server
from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import LOOPBACK
from mlaunch.rendezvous.store_client import Barrier, NotAllCameError
from tests.processes import wait_until

LIMIT = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(params=["over tcp", "in memory", "in a file"])
def store(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[dist.Store]:
    if request.param == "in memory":
        yield dist.HashStore()
    elif request.param == "in a file":
        yield dist.FileStore(str(tmp_path / "store"), 1)
    else:
        connection = tcp_store.connect(LOOPBACK, server.py_server_port, timedelta(seconds=300))
        yield dist.PrefixStore(request.node.name, connection)
    request.node.funcargs.clear()  # which hold the connection until after the look at what is left


def come(store: dist.Store, name: str, size: int = 3, limit: float = LIMIT) -> int:
    """Meets the others; returns which turn it was."""
    return Barrier(store, "key", size).meet(name, limit).number


def test_a_barrier_may_be_used_again_and_again(store: dist.Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        for number in range(4):
            assert set(pool.map(lambda name: come(store, name), "abc")) == {number}


def give_up(store: dist.Store, name: str, size: int = 3, limit: float = 0.05) -> tuple[list[str], str]:
    """Meets nobody; returns who came, and the limit that passed."""
    try:
        come(store, name, size, limit)
    except NotAllCameError as error:
        return sorted(error.came), error.limit
    raise AssertionError("all came")


def test_ranks_that_came_are_named(store: dist.Store) -> None:
    assert give_up(store, "a") == (["a"], "0.05")


def test_all_who_wait_hear_that_one_gave_up(store: dist.Store) -> None:
    """Though the other would have waited longer, all cannot meet any more."""
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(give_up, store, "patient", 3, LIMIT)
        wait_until(lambda: store.check(["key/0/0/0"]))  # a wait would hold the connection, and torch 2.6 has no clone
        assert give_up(store, "hasty") == patient.result(LIMIT) == (["hasty", "patient"], "0.05")


def test_a_rank_that_gave_up_does_not_count_twice(store: dist.Store) -> None:
    """Two came and gave up; when they try again, with a third, they wait for the fourth."""
    for name in "ab":
        give_up(store, name, 4)
    with ThreadPoolExecutor(3) as pool:
        again = [pool.submit(come, store, name, 4) for name in "abc"]
        while store.add("key/2/count", 0) < 3:  # those of a and b are closed
            assert not any(one.done() for one in again)
        assert not any(one.done() for one in again)
        come(store, "d", 4)
        assert [one.result(LIMIT) for one in again] == [0, 0, 0]


def test_a_rank_that_comes_after_others_gave_up_is_the_first_of_the_next_turn(store: dist.Store) -> None:
    """Between their giving up and their saying so in the count, it still gets a position among them."""
    turn = Barrier(store, "key", 2).enter()
    store.set(turn.end, "0.05")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(come, store, "late", 2)
        while store.add("key/0/count", 0) <= 2:  # until it is closed
            assert not late.done()
        assert come(store, "again", 2) == late.result(LIMIT) == 0


def test_values_of_all_are_there_when_one_leaves(store: dist.Store) -> None:
    def take_part(name: str) -> list[bool]:
        turn = Barrier(store, "key", 3).meet(name, LIMIT, put=lambda turn: store.set(f"{turn.place}/of {name}", ""))
        return [store.check([f"{turn.place}/of {other}"]) for other in "abc"]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(take_part, "abc")) == [[True] * 3] * 3


def test_a_barrier_leaves_no_more_than_the_time_before(store: dist.Store) -> None:
    if isinstance(store, dist.FileStore):
        pytest.skip("it counts the keys that it has happened to read")
    with ThreadPoolExecutor(3) as pool:
        left = []
        for _ in range(3):
            list(pool.map(lambda name: come(store, name), "abc"))
            left.append(store.num_keys())
    assert left[0] == left[1] == left[2]
