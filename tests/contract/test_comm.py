"""``mlaunch.comm`` in real ranks, and without any."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from mlaunch import comm, launcher
from tests.contract.functions import caught, error_of


def on(size: int, function: Any, **options: Any) -> list[Any]:
    return launcher(function, size, **options)()


def test_without_a_process_group() -> None:
    data = object()
    assert (comm.get_world_size(), comm.get_rank(), comm.get_local_rank(), comm.get_local_size()) == (1, 0, 0, 1)
    assert comm.is_main_process()
    comm.synchronize()
    comm.synchronize(timeout=1)
    comm.create_local_process_group(8)
    assert comm.all_gather(data) == comm.gather(data) == [data]
    assert comm.broadcast_object(data) is data
    assert comm.all_reduce_mean(3) == 3.0
    assert 0 <= comm.shared_random_seed() < 2**31
    given = {"b": torch.tensor(2), "a": 4}
    assert comm.reduce_dict(given) == {"b": torch.tensor(2.0), "a": 4.0}
    assert comm.reduce_dict(given, average=False) == given
    assert comm.reduce_dict(given) is not given
    with comm.main_process_first() as first, comm.once_per_machine() as local_first:
        assert first
        assert local_first
    with pytest.raises(RuntimeError, match="there is no process group here; call this in a rank"):
        comm.get_local_process_group()
    with pytest.raises(ValueError, match=r"dst=1: the group has 1 rank\(s\); allowed: 0 to 0"):
        comm.gather(data, dst=1)


@pytest.mark.ranks(3)
def test_who_am_i() -> None:
    rank = dist.get_rank()
    assert (comm.get_rank(), comm.get_local_rank(), comm.get_local_size()) == (rank, rank, 3)
    assert comm.is_main_process() == (rank == 0)
    assert comm.get_local_process_group().size() == 3


@pytest.mark.ranks(3)
def test_objects_of_unequal_size_reach_everybody() -> None:
    rank = comm.get_rank()
    mine = {
        "rank": rank,
        "array": numpy.arange(700_000 * rank, dtype=numpy.int32),  # rank 0: nothing; others: out of band
        "tensor": torch.full((rank + 1, 30_000), float(rank)),
        "bytes": b"x" * (200_000 * rank),
    }
    mine["array"].flags.writeable = rank != 2
    everyone = comm.all_gather(mine)
    assert everyone[rank] is mine
    everyone[rank - 1]["tensor"] += 1  # ours to write
    for number, one in enumerate(everyone):
        assert one["rank"] == number
        assert one["array"].sum(dtype=int) == numpy.arange(700_000 * number, dtype=numpy.int32).sum(dtype=int)
        assert tuple(one["tensor"].shape) == (number + 1, 30_000)
        assert len(one["bytes"]) == 200_000 * number


@pytest.mark.ranks(3)
def test_gather_gives_nothing_elsewhere() -> None:
    rank = comm.get_rank()
    assert comm.gather(rank * 10, dst=1) == ([0, 10, 20] if rank == 1 else [])
    large = comm.gather(torch.full((400_000,), rank))
    assert [int(tensor[-1]) for tensor in large] == ([0, 1, 2] if rank == 0 else [])
    with pytest.raises(ValueError, match=r"dst=3: the group has 3 rank\(s\); allowed: 0 to 2"):
        comm.gather(1, dst=3)


@pytest.mark.ranks(2)
def test_an_object_is_broadcast() -> None:
    rank = comm.get_rank()
    assert comm.broadcast_object(None if rank == 0 else rank) is None
    assert comm.broadcast_object(torch.ones(2**19) if rank == 1 else None, src=1).sum().item() == 2.0**19
    with pytest.raises(ValueError, match=r"src=-1: the group has 2 rank\(s\); allowed: 0 to 1"):
        comm.broadcast_object(1, src=-1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["all_gather", "gather", "broadcast_object"])
def test_an_object_that_cannot_be_pickled_is_an_error_everywhere(name: str) -> None:
    data = {"model": threading.Lock()} if comm.get_rank() == 0 else 1
    text = error_of(lambda: getattr(comm, name)(data))
    if comm.get_rank() == 0:
        ours = f"TypeError: {name}(): what this rank passed cannot be pickled: it['model'] is a _thread.lock ("
        assert text.startswith(ours)
    else:
        assert text == f"TypeError: {name}(): rank 0 passed a value that cannot be pickled (its own error names it)"
    assert comm.all_gather(comm.get_rank()) == [0, 1]  # the group still works


@pytest.mark.ranks(3)
def test_a_rank_other_than_the_first_that_cannot_broadcast() -> None:
    data = threading.Lock() if comm.get_rank() == 1 else 1
    text = error_of(lambda: comm.broadcast_object(data, src=1))
    if comm.get_rank() == 1:
        ours = "TypeError: broadcast_object(): what this rank passed cannot be pickled: it is a _thread.lock ("
        assert text.startswith(ours)
    else:
        assert (
            text
            == "TypeError: broadcast_object(): rank 1 passed a value that cannot be pickled (its own error names it)"
        )
    assert comm.broadcast_object(comm.get_rank(), src=1) == 1


@pytest.mark.ranks(3)
def test_groups_of_some_ranks() -> None:
    if comm.get_rank() == 0:
        return
    group = dist.new_group([1, 2], use_local_synchronization=True)
    assert comm.all_gather(comm.get_rank(), group) == [1, 2]
    assert comm.gather("x", 1, group) == (["x", "x"] if comm.get_rank() == 2 else [])
    assert comm.broadcast_object(comm.get_rank(), 1, group) == 2


@pytest.mark.ranks(2)
def test_a_shared_seed_is_rank_0s_draw() -> None:
    torch.manual_seed(comm.get_rank())
    found = comm.shared_random_seed(), comm.shared_random_seed()
    torch.manual_seed(0)
    assert found == (int(torch.randint(2**31, ())), int(torch.randint(2**31, ())))


@pytest.mark.ranks(2)
def test_reduce_dict_is_the_same_on_every_rank() -> None:
    rank = comm.get_rank()
    given = {
        "loss": torch.tensor(1.0 + rank, requires_grad=True),
        "vector": torch.tensor([1, 2], dtype=torch.int64) * (rank + 1),
        "half": torch.tensor(rank, dtype=torch.float16),
        "accuracy": 0.5 * rank,
        "seen": 10 + rank,
    }
    names = list(given) if rank == 0 else list(given)[::-1]
    given = {name: given[name] for name in names}
    mean, total = comm.reduce_dict(given), comm.reduce_dict(given, average=False)
    assert comm.reduce_dict({}) == {}
    assert given["loss"].item() == 1.0 + rank  # type: ignore[attr-defined]
    assert list(mean) == names
    assert mean["loss"] == 1.5
    assert not mean["loss"].requires_grad
    assert torch.equal(mean["vector"], torch.tensor([1.5, 3.0]))
    assert mean["half"].dtype == torch.float16
    assert (mean["accuracy"], mean["seen"]) == (0.25, 10.5)
    assert torch.equal(total["vector"], torch.tensor([3, 6]))
    assert total["vector"].dtype == torch.int64
    assert (total["loss"], total["seen"], total["accuracy"]) == (3.0, 21, 0.5)
    assert isinstance(total["seen"], int)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"a": 1.0, "b": 2.0}, "ValueError: reduce_dict: the ranks passed different things: "
                               "'b' is missing on rank 0 and number on rank 1"),
        ({"a": torch.ones(2)}, "ValueError: reduce_dict: the ranks passed different things: "
                               "'a' is number on rank 0 and cpu tensor of shape (2,) on rank 1"),
        ({"a": "text"}, "TypeError: reduce_dict: 'a' of rank 1 is a str; allowed: tensors and numbers"),
    ],
)  # fmt: skip
def test_reduce_dict_of_different_things_is_an_error_everywhere(odd: dict[str, Any], words: str) -> None:
    given = odd if comm.get_rank() == 1 else {"a": 1.0}
    assert error_of(lambda: comm.reduce_dict(given)) == words
    assert comm.reduce_dict({"a": 1.0}) == {"a": 1.0}


KINDS: list[tuple[Any, Any, Any]] = [  # of both ranks, their sum, their mean
    (2**60 + 1, 2**61 + 2, float(2**60)),
    (2**63 - 1, 2**64 - 2, float(2**63)),
    (-(2**62) - 1, -(2**63) - 2, -float(2**62)),
    (True, 2, 1.0),
    (1 + 2j, 2 + 4j, 1 + 2j),
    (torch.tensor(2**60 + 1), torch.tensor(2**61 + 2), torch.tensor(2.0**60)),
    (torch.tensor([-(2**40) - 1, 5]), torch.tensor([-(2**41) - 2, 10]), torch.tensor([-(2.0**40), 5.0])),
    (torch.tensor(2**62, dtype=torch.uint64), torch.tensor(2**63, dtype=torch.uint64), torch.tensor(2.0**62)),
    (torch.tensor([True, False]), torch.tensor([2, 0]), torch.tensor([1.0, 0.0])),
    (torch.tensor([[1 + 2j]]), torch.tensor([[2 + 4j]]), torch.tensor([[1 + 2j]])),
    (torch.tensor(1.5, dtype=torch.float64), *[torch.tensor(n, dtype=torch.float64) for n in (3, 1.5)]),
    (numpy.float32(1.5), numpy.float32(3), numpy.float32(1.5)),
    (numpy.int16(-300), numpy.int16(-600), -300.0),
    (numpy.bool_(True), 2, 1.0),
    (numpy.complex64(1 + 2j), numpy.complex64(2 + 4j), numpy.complex64(1 + 2j)),
]


@pytest.mark.ranks(2)
def test_reduce_dict_keeps_each_kind_of_number_and_integers_exact() -> None:
    given = {str(number): value for number, (value, _, _) in enumerate(KINDS)}
    for column, average in ((1, False), (2, True)):
        found = comm.reduce_dict(given, average=average)
        for row, got in zip(KINDS, found.values(), strict=True):
            assert (type(got), str(got)) == (type(row[column]), str(row[column]))
            assert getattr(got, "dtype", None) == getattr(row[column], "dtype", None)


def test_reduce_dict_of_one_rank_keeps_them_too() -> None:
    given = {"a": 2**60 + 1, None: True, 3: 1 + 2j, "d": numpy.float32(1.5), "e": torch.tensor([True])}
    text = f"{{'a': {2**60 + 1}, None: 1, 3: (1+2j), 'd': {numpy.float32(1.5)!r}, 'e': tensor([1])}}"
    assert repr(comm.reduce_dict(given, average=False)) == text


@pytest.mark.ranks(2)
def test_reduce_dict_of_an_integer_here_and_a_float_there() -> None:
    first = comm.get_rank() == 0
    found = comm.reduce_dict({"a": 0 if first else 0.5, "b": torch.tensor(1 if first else 0.5), 3: 1}, average=False)
    assert repr(found) == "{'a': 0.5, 'b': tensor(1.5000), 3: 2}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([200, 1], dtype=torch.uint8), "the sum of 'a' is too large for torch.uint8: pass it in a larger"),
        (torch.tensor(2**62), "the sum of 'a' is too large for torch.int64: pass it in a larger type"),
        (numpy.int8(100), "the sum of 'a' is too large for int8: pass it in a larger type"),
        (2**63, "'a' of rank 0 is a number of more than 64 bits; allowed: tensors and numbers"),
    ],
    ids=str,
)
def test_sums_that_do_not_fit_are_refused(value: Any, words: str) -> None:
    assert error_of(lambda: comm.reduce_dict({"a": value}, average=False)).startswith(
        f"OverflowError: reduce_dict: {words}"
    )


def test_reduce_dict_of_one_rank_checks_too() -> None:
    with pytest.raises(TypeError, match="'a' is a str; allowed: tensors and numbers"):
        comm.reduce_dict({"a": "text"})


@pytest.mark.ranks(2)
def test_the_mean_of_a_number() -> None:
    assert comm.all_reduce_mean(comm.get_rank()) == 0.5


@pytest.mark.ranks(3, deadline=60)
def test_the_mean_over_some_ranks() -> None:
    if comm.get_rank() > 0:
        group = dist.new_group([1, 2], use_local_synchronization=True)
        assert comm.all_reduce_mean(comm.get_rank(), group) == 1.5


@pytest.mark.slow
def test_a_barrier_names_those_who_do_not_come() -> None:
    def train() -> str:
        comm.synchronize(timeout=60)
        comm.synchronize(timeout=60)
        store = dist.distributed_c10d._get_default_store()
        if comm.get_rank() in {1, 3}:
            store.wait(["0 gave up", "2 gave up"])
            return ""
        text = error_of(lambda: comm.synchronize(timeout=2))
        store.set(f"{comm.get_rank()} gave up", "")
        return text

    missing = "TimeoutError: synchronize: ranks 1, 3 did not come within 2 s"
    assert on(4, train) == [missing, "", missing, ""]


@pytest.mark.ranks(3)
def test_a_barrier_leaves_no_more_in_the_store_than_the_one_before() -> None:
    store = dist.distributed_c10d._get_default_store()
    comm.synchronize(timeout=60)
    comm.synchronize()
    before = store.num_keys()
    comm.synchronize()
    comm.synchronize(timeout=60)
    comm.synchronize()
    assert store.num_keys() == before


@pytest.mark.ranks(3)
def test_the_main_process_goes_first() -> None:
    with comm.main_process_first() as first:
        now = time.monotonic()
    with comm.once_per_machine() as first_here:
        pass
    assert first == first_here == (comm.get_rank() == 0)
    at, *others = comm.all_gather(now)
    assert all(other > at for other in others)


@pytest.mark.ranks(3)
def test_a_failure_of_the_main_process_reaches_the_others() -> None:
    def block() -> None:
        with comm.main_process_first() as first:
            if first:
                raise OSError("disk full")

    told = "main_process_first(): the block failed on rank 0, which goes first: OSError: disk full"
    assert error_of(block) == ("OSError: disk full" if comm.get_rank() == 0 else f"RuntimeError: {told}")


@pytest.mark.ranks(3, deadline=60)
def test_the_main_process_leaves_by_system_exit() -> None:
    """The others hear of it, instead of waiting for a collective that it does not come to."""

    def block() -> None:
        with comm.main_process_first() as first:
            if first:
                sys.exit(3)

    told = "main_process_first(): the block failed on rank 0, which goes first: SystemExit: 3"
    assert str(caught(block)) == ("3" if comm.get_rank() == 0 else told)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_local_groups_of_equal_machines() -> None:
    refused = (
        "ValueError: num_workers_per_machine=3: the world has 4 ranks, which is no multiple of it; "
        "allowed: a divisor, or None to have the ranks find out"
    )
    assert error_of(lambda: comm.create_local_process_group(3)) == refused
    comm.create_local_process_group(2)
    group = comm.get_local_process_group()
    comm.create_local_process_group(2)
    comm.synchronize()
    assert comm.get_local_process_group() is group
    machine, local_rank = divmod(comm.get_rank(), 2)
    assert (comm.get_local_rank(), comm.get_local_size()) == (local_rank, 2)
    assert comm.all_gather(comm.get_rank(), group) == [2 * machine, 2 * machine + 1]


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_local_groups_of_unequal_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = comm.get_rank()
    monkeypatch.setenv("GROUP_RANK", "0" if rank == 0 else "1")
    comm.create_local_process_group()
    with comm.once_per_machine() as first:
        pass
    wanted = (0, 1, True) if rank == 0 else (rank - 1, 3, rank == 1)
    assert (comm.get_local_rank(), comm.get_local_size(), first) == wanted


@pytest.mark.ranks(2)
def test_a_launcher_that_does_not_say_who_shares_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = (
        "RuntimeError: this process does not know which ranks share a machine: the launcher set no LOCAL_RANK and "
        "LOCAL_WORLD_SIZE; have all ranks call create_local_process_group() first"
    )
    monkeypatch.delenv("LOCAL_RANK")
    assert error_of(comm.get_local_rank) == unknown
    monkeypatch.delenv("GROUP_RANK")
    comm.create_local_process_group()
    assert comm.get_local_rank() == comm.get_rank()


@pytest.mark.ranks(2)
def test_a_local_group_that_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    told = "the group of this machine's 1 ranks was not made; have all ranks call create_local_process_group() first"
    assert error_of(comm.get_local_process_group) == f"RuntimeError: {told}"


@pytest.mark.ranks(2)
def test_a_new_world_forgets_the_old_ones_local_group() -> None:
    comm.create_local_process_group(1)
    assert comm.get_local_size() == 1
    store = dist.distributed_c10d._get_default_store()
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    assert comm.get_local_size() == 2
