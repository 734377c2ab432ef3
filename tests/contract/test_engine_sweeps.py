"""Sweeps on machines that an engine holds: each trial has machines of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, launcher
from tests import launches
from tests.contract.test_engine_calls import LIMIT, Threads
from tests.processes import wait_until


class Alike(Threads):
    """As many machines as are wanted, all alike."""

    def place(self, machines: int | None, command: object) -> object:  # type: ignore[override]
        placed = super().place(machines, command)  # type: ignore[arg-type]
        placed.sizes = [None] * (machines or 2)
        return placed


@pytest.fixture
def engine() -> Iterator[Alike]:
    made = Alike()
    yield made
    for placed in made.placements:
        for thread in placed.threads:  # type: ignore[attr-defined]
            thread.join(LIMIT)


def times(x: float, y: int = 1, folder: Path | None = None) -> tuple[float, int, str]:
    """Goes on while there is a file of the name of ``x``."""
    total = torch.tensor(x)
    dist.all_reduce(total)
    if folder is not None:
        (folder / f"{x}-began-{dist.get_rank()}").touch()
    while folder is not None and (folder / f"{x}-goes-on").exists():
        signal.sigtimedwait([], 0.01)
    for step in range(3):
        mlaunch.report(step, loss=x)
    if x < 0:
        raise ValueError(x)
    print("at", x)
    return float(total) * y, os.getpid(), os.environ["GROUP_RANK"]


@pytest.mark.dear("several launches on several machines")
def test_each_trial_has_machines_of_its_own(engine: Alike, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1-goes-on").touch()
    (tmp_path / "2-goes-on").touch()
    with engine.hold(machines=3, n_gpus=2) as held:
        runs = launcher(times, engine=held, machines=1).grid(x=[1, 2, 3, 4, 5], folder=[tmp_path])
        for x in (3, 4, 5):
            assert runs[x - 1].result(LIMIT)[0][0] == 2 * x  # all on the third machine
        assert [run.state for run in runs] == ["running", "running", "returned", "returned", "returned"]
        hosts = [{row.host for row in run.report.ranks} for run in runs if run.report is not None]
        assert hosts == [{"m2"}] * 3
        stacks = runs[0].stacks()
        assert sorted(stacks) == [0, 1]
        assert " in times" in stacks[0]
        assert runs[1].why()
        (tmp_path / "1-goes-on").unlink()
        (tmp_path / "2-goes-on").unlink()
        assert [[values[0] for values in found] for found in runs.results(LIMIT)] == [[2 * x] * 2 for x in range(1, 6)]
        out = capfd.readouterr().out
        assert "[x=3 0-1] at 3" in out or {"[x=3 0] at 3", "[x=3 1] at 3"} <= set(out.splitlines())
        both = launcher(times, engine=held, machines=2).map([1, 2])
        assert [[values[0] for values in found] for found in both.results(LIMIT)] == [[4] * 4, [8] * 4]
        assert [values[2] for values in both[0].result()] == ["0", "0", "1", "1"]
        assert re.search(r"\[x=1 m0:0-1,m1:2-3\] at 1|\[x=1 m[01]:\d\] at 1", capfd.readouterr().out)
        assert len(launcher(times, engine=held)(1)) == 6  # a blocking call has them all
        assert len(launcher(times, engine=held).submit(1).result(LIMIT)) == 6
        assert [len(run.reports) for run in runs] == [6] * 5  # two ranks each
    assert len(engine.placements) == 1


@pytest.mark.slow
def test_a_call_waits_for_trials_and_these_for_it(engine: Alike, tmp_path: Path) -> None:
    """In order of arrival: one that wants all keeps later ones from overtaking it."""
    (tmp_path / "1-goes-on").touch()
    with engine.hold(machines=2, n_gpus=1) as held:
        one = launcher(times, engine=held, machines=1).submit(1, folder=tmp_path)
        wait_until((tmp_path / "1-began-0").exists)
        every = launcher(times, engine=held, machines=2).submit(2, folder=tmp_path)
        later = launcher(times, engine=held, machines=1).submit(3, folder=tmp_path)
        assert [every.state, later.state] == ["waiting", "waiting"]
        (tmp_path / "1-goes-on").unlink()
        assert [value[0] for value in every.result(LIMIT)] == [4, 4]
        assert [value[0] for value in later.result(LIMIT)] == [3]
        assert [value[0] for value in one.result(LIMIT)] == [1]


@pytest.mark.slow
def test_a_run_is_cancelled_and_another_is_stopped(engine: Alike, tmp_path: Path) -> None:
    def steps() -> tuple[int, str]:
        (tmp_path / f"steps{dist.get_rank()}").touch()
        return next((step, reason) for step in itertools.count() if (reason := mlaunch.stopping()))

    (tmp_path / "1-goes-on").touch()
    with engine.hold(machines=1, n_gpus=2) as held:
        runs = launcher(times, engine=held).map([1, 2, 3], [1] * 3, [tmp_path] * 3)
        wait_until((tmp_path / "1-began-0").exists)
        assert runs[1].cancel()
        assert runs[0].cancel()
        assert runs[2].result(LIMIT)[0][0] == 6
        assert [run.cancelled() for run in runs] == [True, True, False]
        with pytest.raises(CancelledError):
            runs.results()
        run = launcher(steps, engine=held).submit()
        wait_until(lambda: len(list(tmp_path.glob("steps*"))) == 2)
        run.stop("pruned")
        first, second = run.result(LIMIT)
        assert first == second
        assert first[1] == "pruned"


@pytest.mark.slow
def test_failures_and_retries(engine: Alike) -> None:
    def once(x: int) -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and x:
            raise ValueError("at first")
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    with engine.hold(machines=2, n_gpus=1) as held:
        call = launcher(times, engine=held, machines=1)
        found = call.map([1, -2, 3], return_exceptions=True).results(LIMIT)
        assert [found[0][0][0], found[2][0][0]] == [1, 3]
        assert isinstance(found[1], ValueError)
        with pytest.raises(ValueError, match="-2"):
            call.map([1, -2, 3]).results(LIMIT)
        assert launcher(once, engine=held, machines=1).map([0, 1], retries=1).results(LIMIT) == [["0"], ["1"]]


@pytest.mark.slow
def test_a_machine_that_is_lost_is_used_no_more(tmp_path: Path) -> None:
    streams: dict[str, int] = {}

    def serve(stream: launches.FrameStream, host: str) -> None:
        streams[host] = stream.outgoing
        launches.serve_as_member(stream, host)

    def cut(host: str) -> None:
        with socket.socket(fileno=os.dup(streams[host])) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    (tmp_path / "1-goes-on").touch()
    engine = Alike(serve)
    with engine.hold(machines=3, n_gpus=1) as held:
        runs = launcher(times, engine=held, machines=1, grace_period=0.5).map(
            [1, 2, 3], [1] * 3, [tmp_path] * 3, return_exceptions=True
        )
        wait_until((tmp_path / "1-began-0").exists)
        runs[1].result(LIMIT), runs[2].result(LIMIT)
        cut("m1")  # nobody uses it
        cut("m0")
        failed = runs.results(LIMIT)[0]
        assert isinstance(failed, LaunchError)
        assert "host m0 of times() was lost: POWER_CUT on m0" in str(failed)
        again = launcher(times, engine=held, machines=1).map([4, 5, 6])
        assert [values[0][0] for values in again.results(LIMIT)] == [4, 5, 6]
        assert {row.host for run in again if run.report is not None for row in run.report.ranks} == {"m2"}
        assert len(engine.placements) == 1
        (tmp_path / "1-goes-on").unlink()
        wider = launcher(times, engine=held, machines=2).submit(7)  # too few are left: the engine gives others
        assert [value[0] for value in wider.result(LIMIT)] == [14, 14]
        assert len(engine.placements) == 2


@pytest.mark.slow
def test_trials_take_the_warm_ranks_of_their_machines(engine: Alike, tmp_path: Path) -> None:
    with engine.hold(machines=2, n_gpus=2) as held:
        call = launcher(times, engine=held, machines=1, keep=600)
        pids = {tuple(pid for _, pid, _ in values) for values in call.map([1] * 6).results(LIMIT)}
        assert len(pids) == 2  # those of a machine stay
        found = call.map([1, -2, 3, 4], return_exceptions=True).results(LIMIT)
        assert isinstance(found[1], ValueError)
        assert {tuple(pid for _, pid, _ in found[at]) for at in (0, 2, 3)} <= pids
        (tmp_path / "7-goes-on").touch()
        run = call.submit(7, folder=tmp_path)
        wait_until((tmp_path / "7-began-1").exists)
        assert sorted(run.stacks()) == [0, 1]
        assert run.why()
        (tmp_path / "7-goes-on").unlink()
        assert run.result(LIMIT)[0][0] == 14
        assert [(report.rank, report["loss"]) for report in sorted(run.reports, key=lambda one: one.rank)] == [
            *[(0, 7)] * 3, *[(1, 7)] * 3,
        ]  # fmt: skip
        assert len(launcher(times, engine=held)(1)) == 4  # ranks that stay make room
        (tmp_path / "1-goes-on").touch()
        run = call.submit(1, folder=tmp_path)
        wait_until((tmp_path / "1-began-0").exists)
        assert run.cancel()
    launches.end_sets_that_stay()


def test_a_trial_whose_rank_dies_costs_the_ranks_of_its_machine_alone(engine: Alike) -> None:
    def say(dies: bool) -> int:
        if dies and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies:
            dist.barrier()
        return os.getpid()

    with engine.hold(machines=2, n_gpus=2) as held:
        call = launcher(say, engine=held, machines=1, keep=600)
        before = {tuple(values) for values in call.map([False] * 4).results(LIMIT)}
        found = call.map([True, False, False], return_exceptions=True).results(LIMIT)
        assert isinstance(found[0], LaunchError)
        assert "was killed by SIGKILL" in str(found[0])
        after = {tuple(values) for values in call.map([False] * 4).results(LIMIT)}
        assert len(before) == len(after) == 2
        assert len(before & after) == 1
        assert len(engine.placements) == 1
    launches.end_sets_that_stay()


def test_an_impossible_sweep_is_raised_where_it_is_begun(engine: Alike) -> None:
    with pytest.raises(ValueError, match=r"engine=.* with map\(\): mlaunch does not know .* allowed: machines that it"):
        launcher(times, engine=engine).map([1])
    with engine.hold(machines=2, n_gpus=1) as held:
        with pytest.raises(ValueError, match="machines=3 on 2 held machines: allowed: 1 to 2"):
            launcher(times, engine=held, machines=3).map([1])
        with pytest.raises(ValueError, match="max_preemptions=1 with submit"):
            launcher(times, engine=held, max_preemptions=1).submit(1)
        with contextlib.suppress(LaunchError):
            held.close()
        with pytest.raises(LaunchError, match=r"given back \(close\(\) was called\); hold\(\) another"):
            launcher(times, engine=held, machines=1).map([1]).results(LIMIT)
