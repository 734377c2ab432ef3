"""Ranks that stay on machines of an engine, whose machines are threads of this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, Ranks, launcher, scatter
from tests import launches
from tests.contract.test_engine_calls import Threads, engine
from tests.processes import wait_gone, wait_until
from tests.system.engine_caller import Trigger

__all__ = ["engine"]

LIMIT = 60.0


@pytest.fixture
def ranks(engine: Threads) -> Iterator[Ranks]:
    """Two on the first machine, one on the second."""
    with Ranks(n_gpus=2, engine=engine, grace_period=0.5) as made:
        yield made


def pid() -> int:
    return os.getpid()


def total() -> int:
    found = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(found)
    return int(found.item())


@pytest.mark.slow
def test_ranks_stay_on_machines(ranks: Ranks) -> None:
    pids = ranks.run(pid)
    assert len(set(pids)) == 3
    assert ranks.run(pid) == pids
    assert ranks.run(total) == [3, 3, 3]
    assert ranks.world_size == 3
    assert repr(ranks) == "<Ranks: 3 on cpu, idle>"
    report = ranks.last
    assert report is not None
    assert [(row.rank, row.host, row.end) for row in report.ranks] == [
        (0, "m0", "returned"), (1, "m0", "returned"), (2, "m1", "returned"),
    ]  # fmt: skip


@pytest.mark.slow
def test_names_of_a_rank_on_another_machine_complete(ranks: Ranks) -> None:
    ranks.push({"model": torch.ones(1)}, targets=[2])
    before = ranks.last
    assert ranks.cells.names_for_completion("names", "", "mod", 0) == []
    assert ranks.cells.names_for_completion("attributes", "model", "requires_grad", 2) == [
        "requires_grad",
        "requires_grad_",
    ]
    assert ranks.cells.names_for_completion("names", "", "mod", 3) == []
    assert ranks.last is before
    assert ranks.run(total) == [3, 3, 3]


@pytest.mark.slow
def test_a_default_group_that_a_call_has_destroyed_is_made_anew(ranks: Ranks) -> None:
    pids = ranks.run(os.getpid)
    ranks.run(dist.destroy_process_group)
    assert ranks.submit(total).result(LIMIT) == [3, 3, 3]
    assert ranks.run(os.getpid) == pids


@pytest.mark.slow
def test_held_objects_scattered_values_and_futures(ranks: Ranks) -> None:
    held = ranks.hold(lambda size: torch.full((size,), float(dist.get_rank())), 1 << 20)

    def add(tensor: torch.Tensor, number: int) -> float:
        tensor += number
        return tensor[-1].item()

    future = ranks.submit(add, held, scatter([10, 20, 30]))
    assert future.result(LIMIT) == [10.0, 21.0, 32.0]
    assert ranks.run(add, held, 1) == [11.0, 22.0, 33.0]
    assert [value[0].item() for value in held.fetch()] == [11.0, 22.0, 33.0]


def test_output_of_ranks_on_machines(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print(f"rank {dist.get_rank()}")

    for _ in range(3):
        ranks.run(work)
        assert sorted(capfd.readouterr().out.splitlines()) == ["[m0:0] rank 0", "[m0:1] rank 1", "[m1:2] rank 2"]


@pytest.mark.slow
def test_all_that_they_print_is_there_with_the_values(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """Several times what a pipe holds."""

    def work(call: int) -> None:
        if dist.get_rank() == 2:
            print("\n".join(f"call {call} line {line} {'x' * 80}" for line in range(5000)))

    for call in range(3):
        ranks.run(work, call)
        lines = capfd.readouterr().out.splitlines()
        assert [line.split()[2:5] for line in lines] == [[str(call), "line", str(line)] for line in range(5000)]


@pytest.mark.slow
def test_all_that_they_print_in_a_call_that_fails_is_there_at_their_end(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        sys.stdout.write("xyz"[dist.get_rank()] * (1 << 21) + "\nlast line\n")
        sys.stdout.flush()
        dist.barrier()  # else one that still prints is called back
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        ranks.run(work)
    ranks.close()
    found = capfd.readouterr().out
    assert [found.count(letter) for letter in "xyz"] == [1 << 21] * 3
    assert "last line" in found


def test_an_exception_on_one_machine_leaves_them_in_step(ranks: Ranks) -> None:
    """The others have returned already, or are about to."""
    held = ranks.hold(list)

    def fail(rank: int) -> None:
        if dist.get_rank() == rank:
            raise ValueError("no such luck")

    pids = ranks.run(pid)
    for rank in range(3):
        with pytest.raises(ValueError, match="no such luck") as caught:
            ranks.run(fail, rank)
        assert caught.value.__notes__[-1] == "the ranks are in step and stay, with what they hold"
        assert ranks.run(total) == [3, 3, 3]
    assert ranks.run(pid) == pids
    assert held.fetch() == [[], [], []]


@pytest.mark.slow
def test_a_rank_that_works_is_called_back_when_another_machine_fails(ranks: Ranks) -> None:
    """All stay, since none is inside an operation."""

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 2:
            raise ValueError("no such luck")
        while True:
            pass

    pids = ranks.run(pid)
    with pytest.raises(ValueError, match="no such luck"):
        ranks.run(work)
    assert ranks.run(pid) == pids
    report = ranks.history[-2]
    assert [row.end for row in report.ranks] == ["was stopped", "was stopped", "raised ValueError: no such luck"]


@pytest.mark.slow
def test_ranks_inside_an_operation_that_another_machine_never_enters(ranks: Ranks) -> None:
    held = ranks.hold(list)

    def work() -> None:
        if dist.get_rank() == 2:
            raise ValueError("no such luck")
        dist.barrier()

    before = ranks.run(pid)
    with pytest.raises(ValueError, match="no such luck") as caught:
        ranks.run(work)
    assert "not all of them came back in step" in caught.value.__notes__[-1]
    after = ranks.run(pid)
    assert not set(before) & set(after)
    with pytest.raises(ValueError, match="is lost, since the ranks that held it have ended"):
        held.fetch()


@pytest.mark.slow
def test_an_interrupt_ends_the_call_alone(ranks: Ranks) -> None:
    held = ranks.hold(dict)

    def work(seen: dict[str, int]) -> None:
        seen["rank"] = dist.get_rank()
        dist.barrier()
        print("running", flush=True)
        while True:
            pass

    pids = ranks.run(pid)
    with contextlib.redirect_stdout(Trigger("running")), pytest.raises(KeyboardInterrupt) as caught:
        ranks.run(work, held)
    assert caught.value.__notes__[-1] == "the ranks are in step and stay, with what they hold"
    assert ranks.run(pid) == pids
    assert held.fetch() == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@pytest.mark.slow
def test_a_deadline_is_each_calls_own(engine: Threads) -> None:
    def work(rank: int) -> int:
        while dist.get_rank() == rank:
            pass
        return os.getpid()

    with Ranks(n_gpus=2, engine=engine, grace_period=0.5, deadline=1.0) as ranks:
        for rank in (0, 2):
            with pytest.raises(LaunchTimeout, match="deadline of 1 s"):
                ranks.run(work, rank)
        assert len(ranks.run(work, -1)) == 3


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_and_the_next_call_starts_others(ranks: Ranks) -> None:
    def work() -> None:
        dist.barrier()  # all of them have begun
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            signal.pause()

    before = ranks.run(pid)
    with pytest.raises(LaunchError, match=r"rank 2 of \S+work\(\) was killed by SIGKILL") as caught:
        ranks.run(work)
    assert "meanwhile" in str(caught.value)
    assert not set(before) & set(ranks.run(pid))


@pytest.mark.nightly("0")
@pytest.mark.slow
@pytest.mark.parametrize("machine", [0, 1])
def test_an_agent_that_is_killed(ranks: Ranks, machine: int) -> None:
    def work(agents: list[int]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(agents[machine], signal.SIGKILL)
        while True:
            signal.pause()

    before = ranks.run(os.getppid)
    with pytest.raises(LaunchError, match=rf"the agent on host m{machine} of \S+work\(\) was killed by SIGKILL"):
        ranks.run(work, [before[0], before[2]])
    assert not set(before) & set(ranks.run(os.getppid))


def test_ranks_that_wait_in_vain_are_found_at_once(engine: Threads, tmp_path: Path) -> None:
    """However long the grace period is, and though all on their machine are in step."""

    def work() -> None:
        if dist.get_rank() == 2:
            wait_until(lambda: len(list(tmp_path.iterdir())) == dist.get_world_size() - 1)
            raise ValueError("no such luck")
        barrier = dist.barrier(async_op=True)
        (tmp_path / str(dist.get_rank())).touch()  # it is entered by now
        barrier.wait()

    with Ranks(n_gpus=2, engine=engine, grace_period=1000) as ranks:
        with pytest.raises(ValueError, match="no such luck") as caught:
            ranks.run(work)
        note = caught.value.__notes__[-1]
        assert "not all of them came back in step" in note
        told = f"{caught.value.__cause__}\n{note}"  # in the report, or in the note about the ranks
        assert re.search(r"\n  (ranks 0-1 were|rank 0 was) in \w+ at test_engine_ranks\.py:", told), told


def test_a_rank_that_leaves_ends_all(ranks: Ranks) -> None:
    def work() -> None:
        if dist.get_rank() == 2:
            sys.exit(0)
        while True:
            signal.pause()

    with pytest.raises(LaunchError, match="rank 2"):
        ranks.run(work)


@pytest.mark.slow
def test_a_failure_that_is_over_does_not_hurry_the_end(engine: Threads, tmp_path: Path) -> None:
    """The last rank leaves after those of the machine where a call has failed."""

    def register(pids: list[int]) -> None:
        def leave() -> None:
            wait_gone(pids)
            (tmp_path / "left").touch()

        if dist.get_rank() == 2:
            atexit.register(leave)

    def fail() -> None:
        if dist.get_rank() == 0:
            raise ValueError("no such luck")

    with Ranks(n_gpus=2, engine=engine) as ranks:
        ranks.run(register, ranks.run(pid)[:2])
        with pytest.raises(ValueError, match="no such luck"):
            ranks.run(fail)
    assert (tmp_path / "left").exists()


@pytest.mark.slow
def test_ranks_that_are_lost_between_calls(engine: Threads) -> None:
    with Ranks(n_gpus=2, engine=engine, restart=False) as ranks:
        victim = ranks.run(pid)[2]
        os.kill(victim, signal.SIGKILL)
        wait_gone([victim])
        with pytest.raises(LaunchError, match="SIGKILL"):  # RanksLost, if the news has come
            ranks.run(pid)


@pytest.mark.slow
def test_large_arguments_and_values(ranks: Ranks) -> None:
    """Those of earlier calls stay as they are."""
    tensors = [torch.full((1 << 20,), float(number)) for number in range(3)]
    found = [ranks.run(lambda tensor: tensor + dist.get_rank(), tensor) for tensor in tensors]
    assert [[value.unique().item() for value in values] for values in found] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_an_exit_before_they_have_joined(engine: Threads) -> None:
    Ranks(n_gpus=2, engine=engine).close()


@pytest.mark.slow
def test_ranks_are_seen_where_they_were_called(ranks: Ranks) -> None:
    pids = ranks.run(pid)
    launch: dict[str, Any] = {"ranks": [{"pid": 0}]}
    while not all(rank["pid"] for rank in launch["ranks"]):  # an agent listens some moments after its ranks' start
        seen = launches.own_statuses()  # other launches may run here
        (launch,) = (one for one in seen if len(one["ranks"]) == 3)
    assert launch["function"] == "Ranks (3)"
    assert [(rank["pid"], rank["host"]) for rank in launch["ranks"]] == list(zip(pids, ["m0", "m0", "m1"], strict=True))


@pytest.mark.slow
def test_ranks_of_a_decorated_function_stay(engine: Threads) -> None:
    call = launcher(pid, 2, engine=engine, keep=60)
    pids = call()
    assert call() == pids
    assert launcher(total, 2, engine=engine, keep=60)() == [3, 3, 3]
    assert len(engine.placements) == 1
    launches.end_sets_that_stay()
    assert not set(pids) & set(call())
    launches.end_sets_that_stay()


@pytest.mark.slow
def test_held_machines_are_theirs_until_they_end(engine: Threads) -> None:
    with engine.hold(n_gpus=2) as cluster:
        with Ranks(engine=cluster) as ranks:
            pids = ranks.run(pid)
            with pytest.raises(LaunchError, match=r"^these machines are in use by Ranks \(3\)"):
                launcher(pid, engine=cluster)()
            with pytest.raises(LaunchError, match="these machines are in use by"):
                Ranks(engine=cluster)
            assert ranks.run(pid) == pids
        assert not set(launcher(pid, engine=cluster)()) & set(pids)
        kept = launcher(pid, engine=cluster, keep=60)  # they end with the machines
        pids = kept()
        assert kept() == pids
        assert launcher(total, engine=cluster)() == [3, 3, 3]  # they make room
        assert not set(kept()) & set(pids)
    assert len(engine.placements) == 1


@pytest.mark.slow
def test_machines_are_held_while_ranks_stay_there(engine: Threads) -> None:
    with engine.hold(n_gpus=2) as cluster, Ranks(engine=cluster) as ranks:
        launches.give_back_after(cluster, 0.01)  # not before: a busy machine takes longer to ask for ranks
        pids = ranks.run(pid)
        assert cluster.hosts == ["m0", "m1"]
        assert ranks.run(pid) == pids
        ranks.close()
        until = time.monotonic() + LIMIT
        while cluster.hosts:
            assert time.monotonic() < until
    with pytest.raises(LaunchError, match=r"no call came for 0.01 s"):
        Ranks(engine=cluster)


@pytest.mark.slow
def test_a_cluster_that_is_closed_ends_them(engine: Threads) -> None:
    cluster = engine.hold(n_gpus=2)
    ranks = Ranks(engine=cluster)
    future = ranks.submit(pid)
    cluster.close()
    assert len(future.result(LIMIT)) == 3
    with pytest.raises(LaunchError, match="given back"):
        ranks.run(pid)


def test_one_machine_alone(engine: Threads) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    with Ranks(n_gpus=2, machines=1, engine=engine) as ranks:  # the last machine says that it has one rank
        pids = ranks.run(pid)
        with pytest.raises(ValueError, match="no such luck"):
            ranks.run(fail)
        assert ranks.run(pid) == pids
        assert len(pids) == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a call", "between calls"])
def test_a_machine_that_is_lost(when: str) -> None:
    """The call ends with it, and the next one asks the engine for others."""
    streams: dict[str, int] = {}

    def serve(stream: launches.FrameStream, host: str) -> None:
        streams[host] = stream.outgoing
        launches.serve_as_member(stream, host)

    def cut() -> None:
        with socket.socket(fileno=os.dup(streams["m1"])) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def work() -> None:
        if dist.get_rank() == 2:
            print("running", flush=True)
        while True:
            signal.pause()

    engine = Threads(serve)
    with Ranks(n_gpus=2, engine=engine, grace_period=0.5) as ranks:
        ranks.run(pid)
        if when == "between calls":
            cut()
            assert launches.session_of(ranks).ended.wait(LIMIT)
            with pytest.warns(RuntimeWarning, match="the ranks were lost between calls: host m1 was lost: POWER_CUT"):
                assert len(ranks.run(pid)) == 3
            return
        with contextlib.redirect_stdout(Trigger("running", cut)), pytest.raises(LaunchError) as caught:
            ranks.run(work)
        assert re.match(r"host m1 of \S+work\(\) was lost: POWER_CUT on m1", str(caught.value))
        assert "meanwhile" in str(caught.value)
        assert len(ranks.run(pid)) == 3
    assert len(engine.placements) == 2
