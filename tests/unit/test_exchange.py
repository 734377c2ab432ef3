"""How objects are exchanged: sizes, seals, and what a link refuses."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import comm, launcher
from mlaunch.comm.rank import exchange, world
from tests.contract.functions import error_of
from tests.contract.test_comm import on


@pytest.mark.slow
@pytest.mark.ranks(2, deadline=60)
def test_buffers_as_large_as_those_that_travel_by_themselves_and_their_neighbours() -> None:
    """At the limit sender and receivers must choose the same way."""
    sizes = [exchange._LARGE + more for more in (0, 1, -1)]
    mine = [torch.full((size,), 10 * comm.get_rank() + i, dtype=torch.uint8) for i, size in enumerate(sizes)]
    everyone = [*comm.all_gather(mine), *comm.gather(mine), comm.broadcast_object(mine, src=1)]
    found = [[(len(tensor), tensor.unique().tolist()) for tensor in tensors] for tensors in everyone]
    first, second = ([(size, [10 * rank + i]) for i, size in enumerate(sizes)] for rank in range(2))
    assert found == ([first, second, first, second, second] if comm.get_rank() == 0 else [first, second, second])


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:The given")
def test_a_large_buffer_that_may_not_be_written_to() -> None:
    """torch warns of memory that it could write to and must not."""
    size = 2 * exchange._LARGE
    given = numpy.frombuffer(bytes([comm.get_rank() + 1]) * size, dtype=numpy.uint8)
    assert [int(one.sum(dtype=int)) for one in comm.all_gather(given)] == [size, 2 * size]


@pytest.mark.ranks(2)
def test_blobs_are_padded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one travels at its own size, lest one among many small ones costs that of all."""
    gather, padded = exchange._Link.gather_padded, []

    def gather_and_tell(link: Any, blob: bytearray, sizes: list[int]) -> Any:
        padded.append(max(sizes))
        return gather(link, blob, sizes)

    monkeypatch.setattr(exchange._Link, "gather_padded", gather_and_tell)
    besides = len(exchange._pack(b"x" * 1000).blob) - 1000
    for size in (exchange._PADDED, exchange._PADDED + 1):
        mine = b"" if comm.get_rank() == 0 else b"x" * (size - besides)
        assert comm.all_gather(mine) == [b"", b"x" * (size - besides)]
    assert padded == [exchange._PADDED]


@pytest.mark.ranks(2, deadline=60)
@pytest.mark.parametrize("size", [999, 1000, 1001, 1999, 2000, 3500])
def test_values_of_several_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As blobs, and by themselves."""
    for name, value in {"_CHUNK": 1000, "_LARGE": 1500, "_PADDED": 100}.items():
        monkeypatch.setattr(exchange, name, value)
    values = [torch.arange(size).to(torch.uint8) + rank for rank in range(2)]
    mine = values[comm.get_rank()]
    pairs = [*zip(comm.all_gather(mine), values, strict=True), (comm.broadcast_object(mine, src=1), values[1])]
    pairs += zip(comm.gather(mine, dst=1), values, strict=False)
    assert len(pairs) == 3 + 2 * comm.get_rank()
    assert all(torch.equal(came, wanted) for came, wanted in pairs)


@pytest.mark.ranks(2)
def test_a_group_that_cannot_carry_cpu_tensors_gets_a_twin() -> None:
    """A group for accelerators alone; no accelerator is touched, since objects take the twin."""
    group = dist.new_group([0, 1], backend="cuda:gloo")
    twin = exchange.cpu_group(group)
    assert exchange.cpu_group(group) is twin is not group
    assert comm.all_gather(comm.get_rank(), group) == [0, 1]


def test_none_leaves_while_others_still_make_their_local_group() -> None:
    """gloo would let it, and its end would break their group."""

    def train() -> bool | None:
        store = dist.distributed_c10d._get_default_store()
        first = dist.get_rank() == 0
        gather, make = exchange.gather_everywhere, world.subgroup

        def gather_and_tell(*args: Any) -> Any:
            if first:
                store.set("moved", "waits")
            return gather(*args)

        def make_and_look(*args: Any) -> Any:
            made = make(*args)
            if not first:
                seen.append(store.get("moved") == b"left")
            return made

        seen: list[bool] = []
        exchange.gather_everywhere = gather_and_tell
        world.subgroup = make_and_look
        comm.create_local_process_group(2)
        if first:
            store.set("moved", "left")
        return None if first else seen[0]

    assert on(2, train) == [None, False]


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


class Between:
    """A stranger on the way to this rank, who puts other objects in the place of rank 0's."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        link = exchange._Link
        gather, broadcast, receive = link.gather_padded, link.broadcast, link.receive

        def gather_changed(to: Any, blob: bytearray, sizes: list[int]) -> list[Any]:
            first, *others = gather(to, blob, sizes)
            return [bytearray(change(bytes(first))), *others]

        link.gather_padded = gather_changed  # type: ignore[method-assign]
        link.broadcast = lambda *args, **kwargs: change(bytes(broadcast(*args, **kwargs)))  # type: ignore[method-assign]
        link.receive = lambda *args, **kwargs: change(bytes(receive(*args, **kwargs)))  # type: ignore[method-assign]


EXCHANGES: tuple[Callable[[object], object], ...] = (
    comm.all_gather,
    lambda value: comm.gather(value, dst=1),
    comm.broadcast_object,
    lambda value: comm.all_gather([value] * 40_000),  # by itself, since it is not small
)


@pytest.mark.parametrize("number", range(len(EXCHANGES)))
def test_an_object_of_a_stranger_is_not_unpickled(number: int, tmp_path: Path) -> None:
    def train() -> str | None:
        def change(blob: bytes) -> bytes:
            evil = pickle.dumps(Bomb(tmp_path / "ran"))
            return blob[: exchange._SEAL_SIZE] + exchange._COUNT.pack(len(evil), 0) + evil

        if comm.get_rank() == 0:
            EXCHANGES[number](1.5)
            return None
        Between(change)
        return error_of(lambda: EXCHANGES[number](2.5))

    words = r"what came as rank 0's was not sent by that rank for this call, so nothing of it was unpickled"
    assert re.search(words, on(2, train)[1])
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_an_object_that_was_sent_before_is_refused() -> None:
    """In the same place of another exchange, call or group."""

    def train(other_group: bool) -> str | None:
        group = dist.new_group([0, 1])
        seen: list[bytes] = []

        def change(blob: bytes) -> bytes:
            seen.append(blob)
            return seen[0]

        if comm.get_rank() == 1:
            Between(change)
        first = comm.all_gather(["first", comm.get_rank()], group if other_group else None)
        assert first[0] == ["first", 0]
        if comm.get_rank() == 0:
            comm.all_gather(["then", 0])
            return None
        return error_of(lambda: comm.all_gather(["then", 1]))

    for other_group in (False, True):
        said = launcher(train, 2)(other_group)[1]
        assert "what came as rank 0's was not sent by that rank" in said


def test_a_seal_of_a_group_does_not_hold_in_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default group that is made again within a call has the name and the members of the last one."""

    class Group:
        """Stands for one of torch's."""

    monkeypatch.setattr(exchange, "_describe_group", lambda _: b"default")
    first, second, elsewhere = cast("Any", Group()), cast("Any", Group()), cast("Any", Group())
    blob = bytearray(exchange._SEAL_SIZE) + b"what rank 0 sends"
    exchange.Seal(first).put(blob, 0)
    assert not exchange.Seal(second).holds(blob, 0)
    monkeypatch.setattr(exchange, "_numbers", exchange._GroupNumbers())  # as in another rank
    assert exchange.Seal(elsewhere).holds(blob, 0)


def test_objects_are_exchanged_after_a_call_that_was_broken_off() -> None:
    """Of ranks that stay, and have come to different counts before any met the others."""

    def count_alone() -> None:
        if dist.get_rank() == 0:
            exchange.Seal(world.group())
        raise ValueError("broken off")

    with mlaunch.Ranks(n_gpus=2) as ranks:
        assert ranks.run(lambda: comm.all_gather(dist.get_rank())) == [[0, 1]] * 2
        with pytest.raises(ValueError, match="broken off"):
            ranks.run(count_alone)
        assert ranks.run(lambda: comm.all_gather(dist.get_rank())) == [[0, 1]] * 2
