"""Launches that are submitted: futures, all driven by one thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, Run, launcher
from tests import launches
from tests.processes import alive, wait_until


@launcher(n_gpus=2)
def double(x: int, plus: int = 1) -> int:
    return 2 * x + plus + dist.get_rank()


def hold(folder: Path, name: str = "begun") -> str:
    """Runs until its file is removed."""
    mark = folder / f"{name}-{os.getpid()}"
    mark.touch()
    while mark.exists():
        signal.sigtimedwait([], 0.01)
    return name


def reporting() -> None:
    """Reports once, and goes on until it is asked to stop."""
    mlaunch.report(step=1)
    wait_until(lambda: bool(mlaunch.stopping()))


def holding(folder: Path, name: str) -> list[int]:
    """Waits until both ranks hold; returns their pids."""
    wait_until(lambda: len(list(folder.glob(f"{name}-*"))) == 2)
    return [int(mark.name.partition("-")[2]) for mark in folder.glob(f"{name}-*")]


@pytest.mark.slow
def test_a_callback_may_wait_for_what_it_submits(tmp_path: Path) -> None:
    """In each way, while others go on, which one thread drives: that in which it is called, until it waits."""
    found: concurrent.futures.Future[object] = concurrent.futures.Future()
    one = launcher(hold, 1)

    def again(_: object) -> None:
        runs = [one.submit(tmp_path / "nowhere"), launcher(int, 1).submit(3), one.submit(tmp_path, "third")]
        names = [run.name for run in concurrent.futures.as_completed(runs[:2], 120)]
        done, _ = concurrent.futures.wait(runs, 120)
        sweep = launcher(int, 1, concurrent=2).map([4, 5]).results(120)
        found.set_result((len(done), {*names}, runs[2].result(), type(runs[0].exception()), sweep, first.done()))

    first = one.submit(tmp_path, "first")
    second = one.submit(tmp_path, "second")
    second.add_done_callback(lambda _: sys.exit("nobody"))
    second.add_done_callback(again)
    for name in ("second", "third", "first"):
        wait_until(lambda name=name: list(tmp_path.glob(f"{name}-*")))  # type: ignore[misc]
        for mark in tmp_path.glob(f"{name}-*"):
            mark.unlink()
        if name == "third":
            expected = (3, {"hold()", "int()"}, ["third"], FileNotFoundError, [[4], [5]], False)
            assert found.result(120) == expected
    assert first.result(120) == ["first"]
    wait_until(lambda: launches.THREAD_OF_RUNS not in [thread.name for thread in threading.enumerate()])


def test_a_callback_may_wait_for_another_that_has_ended_with_it() -> None:
    """Or for the sweep whose last trial calls it back: there is no other thread that would tell of them."""
    told: list[object] = []
    runs = launcher(int, 1, concurrent=2).map([1, 2])
    for run in runs:
        run.add_done_callback(lambda _: told.append(runs.results(120)))
    wait_until(lambda: len(told) == 2)
    assert told == [[[1], [2]]] * 2


@pytest.mark.slow
def test_a_callback_of_a_report_may_wait_for_another_run() -> None:
    told: list[object] = []
    run = launcher(reporting, 1).submit()
    run.on_report(lambda _: (told.append(launcher(int, 1).submit(3).result(120)), run.stop()))
    assert run.result(120) == [None]
    assert told[0] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("wait", [Run.result, lambda run: concurrent.futures.wait([run])])
def test_a_callback_that_waits_for_its_own_run_is_told_so(wait: Callable[[Run], object]) -> None:
    said: list[str] = []

    def waits(_: object) -> None:
        try:
            wait(run)
        except RuntimeError as error:
            said.append(str(error))

    other, run = launcher(reporting, 1).submit(), launcher(reporting, 1).submit()
    run.on_report(waits)
    wait_until(lambda: said)
    for one in (run, other):
        one.stop()
        assert one.result(120) == [None]
    assert said[0] == "a callback waits for the run that has called it, which continues only after that"


def stubborn(folder: Path) -> None:
    """Ends by SIGKILL alone, and so after its grace period."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold(folder)


@pytest.mark.slow
def test_a_timeout_in_an_event_loop_does_not_stop_it(tmp_path: Path) -> None:
    """Nor do cancel() there, of a run and of a sweep; an interrupt of a wait waits for the end in any case."""

    async def meets_its_timeout() -> bool:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(run), 0)
        assert run.cancel()
        runs.cancel()
        return run.done()  # it would be, had the loop waited

    run = launcher(stubborn, 1, grace_period=1).submit(tmp_path)
    runs = launcher(stubborn, 1, grace_period=1).map([tmp_path])
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    assert not asyncio.run(meets_its_timeout())
    with pytest.raises(concurrent.futures.CancelledError):
        run.result(120)
    assert runs[0].cancel()


def surroundings() -> tuple[str | None, str, int, list[str], str]:
    """Returns what a rank has of its caller."""
    return os.environ.get("TRIAL"), os.getcwd(), _umask(), sys.argv, str(warnings.filters[0][0])


def _umask() -> int:
    os.umask(was := os.umask(0))
    return was


@pytest.mark.parametrize("options", [{}, {"concurrent": 2}, {"keep": 0.05}])
def test_a_submitted_call_has_the_surroundings_of_the_moment_at_which_it_was_submitted(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = launcher(surroundings, 1, log_dir="logs", **options)
    expected: list[object] = []
    runs: list[Run] = []
    for number, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch, warnings.catch_warnings():
            patch.setenv("TRIAL", name)
            patch.chdir(tmp_path / name)
            patch.setattr(sys, "argv", [name])
            warnings.simplefilter("error" if number else "ignore")
            was = os.umask(0o70 + number)
            expected.append(surroundings())
            runs.append(look.submit())
            os.umask(was)
    assert [run.result(120)[0] for run in runs] == expected
    assert [run.log_dir is not None and Path(run.log_dir).parent for run in runs] == [
        tmp_path / name / "logs" for name in ("first", "second")
    ]


def test_futures_of_launches(tmp_path: Path) -> None:
    runs = [double.options(log_dir=tmp_path).submit(number) for number in range(4)]
    done, waiting = concurrent.futures.wait(runs, 120)
    assert (done, waiting) == ({*runs}, set())
    assert [run.result() for run in runs] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [run.arguments for run in runs] == [{"x": number, "plus": 1} for number in range(4)]
    assert len({run.log_dir for run in runs}) == 4
    assert all(run.report is not None and len(run.report.ranks) == 2 for run in runs)
    assert double.last in [run.report for run in runs]
    assert "double(x=3, plus=1): done" in repr(runs[3])
    assert not runs[0].cancel()  # it is over

    async def awaited() -> list[int]:
        return await asyncio.wrap_future(double.submit(1))

    assert asyncio.run(awaited()) == [3, 4]


def fail(with_what: object) -> None:
    raise ValueError(with_what)


def test_failures_are_the_futures() -> None:
    run = launcher(fail, n_gpus=1).submit("this")
    told: list[str] = []
    run.add_done_callback(lambda _: told.append(threading.current_thread().name))
    error = run.exception(120)
    assert isinstance(error, ValueError)
    assert isinstance(error.__cause__, LaunchError)
    unpicklable = launcher(fail, n_gpus=1).submit(threading.Lock())
    with pytest.raises(TypeError, match=r"argument 0 of fail\(\) .* cannot be pickled"):
        unpicklable.result(120)
    assert unpicklable.report is None
    wait_until(lambda: told != [])


def test_cancel_of_one_that_runs_and_of_one_that_waits(tmp_path: Path) -> None:
    held = launcher(hold, n_gpus=2, concurrent=1)
    first, second, third = (held.submit(tmp_path, name) for name in ("first", "second", "third"))
    pids = holding(tmp_path, "first")
    wait_until(lambda: len(launches.leases()[1]) == 1)  # the third has no ticket of its own
    assert (first.running(), second.running()) == (True, False)
    wait_until(lambda: len(first.stacks()) == 2)  # it listens a moment after it has begun
    assert all("hold" in stack for stack in first.stacks().values())
    assert second.stacks() == {}
    assert str(second.stacks()) == "no rank runs"
    assert second.cancel()
    assert first.cancel()
    assert not any(map(alive, pids))
    assert first.cancelled()
    for pid in holding(tmp_path, "third"):
        (tmp_path / f"third-{pid}").unlink()
    assert not list(tmp_path.glob("second*"))
    assert third.result(120) == ["third", "third"]


def begin_and_end(log: Path) -> None:
    """Note both, with a moment in between in which others could begin."""
    with log.open("a") as file:
        file.write("begun ")
    os.sched_yield()
    with log.open("a") as file:
        file.write("ended ")


def test_submitted_calls_of_one_place_take_turns(tmp_path: Path) -> None:
    """The next in line begins as soon as its place is free, and no two are there at the same time."""
    runs = [launcher(begin_and_end, 1, concurrent=1).submit(tmp_path / "log") for _ in range(3)]
    try:
        assert [run.result(30) for run in runs] == [[None]] * 3
    finally:
        for run in runs:
            run.cancel()
    assert (tmp_path / "log").read_text() == "begun ended " * 3
    wait_until(lambda: launches.leases() == ([], []))  # the last process of the last launch may still be ending


def count(folder: Path) -> tuple[int, str]:
    """Counts steps until it is to stop."""
    (folder / str(dist.get_rank())).touch()
    return next((step, reason) for step in itertools.count() if (reason := mlaunch.stopping()))


def test_a_run_is_asked_to_stop(tmp_path: Path) -> None:
    run = launcher(count, n_gpus=2).submit(tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    run.stop("enough")
    (step, reason), other = run.result(120)
    assert (step, reason) == other == (step, "enough")
    assert run.report is not None
    assert run.report.stopped is not None
    early = launcher(count, n_gpus=2).submit(tmp_path)
    early.stop()
    assert early.result(120)[0] == early.result()[1]


def test_misuse_is_raised_where_it_is_submitted() -> None:
    with pytest.raises(TypeError, match=r"double\(\) missing 1 required positional argument: 'x'"):
        double.submit()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="start_method='spawn' with submit"):
        double.options(start_method="spawn").submit(1)
    with pytest.raises(ValueError, match=r"n_gpus=1: .*|devices=\[7\]: ranks on CPUs have no device numbers"):
        double.options(n_gpus=None, devices=[7], device_type="cpu").submit(1).result(120)
    assert launches.THREAD_OF_RUNS not in [thread.name for thread in threading.enumerate()]
