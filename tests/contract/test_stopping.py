"""Runs that are asked to stop: all ranks return after the same step."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import mlaunch
from mlaunch import LaunchError, LaunchTimeout, Ranks, launcher
from tests import launches, schema
from tests.conftest import ROOT
from tests.contract.test_engine_calls import Threads
from tests.imported import IMPORTED
from tests.processes import listen, wait_until
from tests.stop_storm import storm

pytestmark = pytest.mark.usefixtures("the_next_call_works")
LIMIT = 10**7  # steps
HERE = "test_stopping.py"
WAITS = r"ranks? [0-9, -]+ waits? for it"


def steps() -> Iterator[int]:
    """Give the numbers of steps, each of which takes a moment without work."""
    for step in range(1, LIMIT):
        signal.sigtimedwait([], 0.001)
        yield step


def train(caller: int, at: int, in_step: bool) -> tuple[int, str]:
    """Returns the step at which it was told to stop, and why."""
    for step in steps():
        if in_step:
            dist.all_reduce(torch.ones(1))
        if step == at and dist.get_rank() == 1:
            os.kill(caller, signal.SIGUSR1)
        if reason := mlaunch.stopping():
            return step, reason
    raise AssertionError("it was not stopped")


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [True, False])
def test_all_ranks_stop_at_the_same_step(in_step: bool) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    ours = launcher(train, 2, stop_on="USR1")
    first, second = ours(os.getpid(), 50, in_step)
    assert first == second
    assert first[0] >= (50 if in_step else 1)
    assert first[1] == "USR1"
    assert ours.last is not None
    assert ours.last.stopped is not None
    assert (ours.last.stopped.reason, ours.last.stopped.step) == ("USR1", first[0])
    assert f"stopped at step {first[0]}, as asked at " in str(ours.last)
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [True, False])
def test_ranks_of_several_machines_stop_at_the_same_step(in_step: bool) -> None:
    ours = launcher(train, 2, stop_on="USR1", engine=Threads())
    told = ours(os.getpid(), 50, in_step)
    assert told == [told[0]] * 3
    assert told[0][1] == "USR1"
    assert ours.last is not None
    assert ours.last.stopped is not None
    assert ours.last.stopped.step == told[0][0]


def free_port() -> int:
    with listen() as listener:
        return int(listener.getsockname()[1])


def by_hand(rank_start: int, port: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """One of two machines, each of which has a caller of its own."""
    own: dict[str, Any] = {
        "world_size": 3,
        "rank_start": rank_start,
        "master_ip": "127.0.0.1",
        "port": port,
        "token": "hush hush hush",
    }
    own["join_timeout"] = 60.0
    return launcher(function, 1 if rank_start else 2, device_type="cpu", **own, **options)(*args)


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [True, False])
def test_machines_that_were_started_by_hand_stop_at_the_same_step(in_step: bool) -> None:
    """The signal comes to one of them."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(by_hand, 2, port, train, os.getpid(), 50, in_step)
        told = by_hand(0, port, train, os.getpid(), 50, in_step, stop_on="USR1") + other.result()
    assert told == [told[0]] * 3
    assert told[0][1] == "USR1"


def look_on() -> tuple[int, str]:
    for step in steps():
        if reason := mlaunch.stopping():
            return step, reason
    raise AssertionError("it was not stopped")


def never_look() -> None:
    threading.Event().wait()


def ours() -> list[dict[str, Any]]:
    return [launch for launch in launches.ask("status") if launch["caller"] == os.getpid()]


def stop_the_second(function: Callable[..., Any]) -> list[Future[list[Any]]]:
    """Asks the machine that has not the gate by ``mlaunch stop``, once both run."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(by_hand, rank_start, port, function, stop_grace=60.0) for rank_start in (0, 2)]

        def both_run() -> bool:
            ranks = [rank for launch in ours() for rank in launch["ranks"]]
            return [rank["state"] for rank in ranks] == ["running the function"] * 3

        wait_until(both_run)
        [second] = [launch for launch in ours() if launch["ranks"][0]["rank"] == 2]
        launches.ask("stop", f"{second['id']}-2", patient=True)
        wait(runs)
    return runs


@pytest.mark.slow
def test_any_machine_may_be_asked() -> None:
    runs = stop_the_second(look_on)
    told = [value for run in runs for value in run.result()]
    assert told == [told[0]] * 3
    assert told[0][1] == "asked"


@pytest.mark.slow
def test_machines_whose_ranks_never_look_are_ended() -> None:
    for run in stop_the_second(never_look):
        with pytest.raises(LaunchError, match=r"was ended by mlaunch stop \(pid \d+\)"):
            run.result()


class Struck(Dataset[int]):
    """Its worker gets what a scheduler sends to all processes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        strike(os.getpid())
        return index


def strike(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGUSR1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.nightly("*-spawn", "False-forkserver")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "method"), [(False, "fork"), (False, "forkserver"), (False, "spawn"), (True, None)]
)
def test_a_signal_to_all_processes_asks_once_the_caller_has_it(machines: bool, method: str | None) -> None:
    """``method``: how workers of data loaders are started. None: as is usual, by "forkserver" from Python 3.14 on."""

    def work(caller: int) -> tuple[int, str]:
        strike(os.getpid(), os.getppid(), parent_of(os.getppid()))
        loader = DataLoader(Struck(), num_workers=1, multiprocessing_context=method)
        assert [int(one) for one in loader] == [0, 1]
        dist.barrier()
        return train(caller, 3, True)

    ours = launcher(work, 2, stop_on="TERM,USR1", engine=Threads() if machines else None)
    told = ours(os.getpid())
    assert told == [told[0]] * len(told)
    assert told[0][1] == "USR1"


def test_ranks_that_let_SIGTERM_pass_are_ended_all_the_same(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    def fail() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("the others are ended")
        (tmp_path / "fifo").read_text()

    with pytest.raises(ValueError, match="the others are ended"):
        launcher(fail, 2, stop_on="TERM", grace_period=10**6)()


SCRIPT = """
import os, signal, sys, mlaunch
for step in range(1, 10**7):
    signal.sigtimedwait([], 0.001)
    if step == 20 and os.environ["RANK"] == "1":
        open(sys.argv[1], "w").close()
    if reason := mlaunch.stopping():
        print("stopped", reason, step)
        break
"""


def test_a_script_that_is_asked_to_stop(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "there")
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--nproc-per-node", "2", "--stop-on", "TERM", "--error-file", str(tmp_path / "why.json")]
    command = [IMPORTED, "-m", "mlaunch", "run", *flags, str(tmp_path / "train.py"), str(tmp_path / "there")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        (tmp_path / "there").read_text()
        running.terminate()
        said, _ = running.communicate(timeout=60)
    why = json.loads((tmp_path / "why.json").read_text())
    schema.check(why, "failure")
    assert (running.returncode, why["status"], why["kind"], why["retry"]) == (75, 75, "stopped_as_agreed", True)
    first, second = sorted(said.splitlines())
    assert first == second
    assert first.startswith("stopped TERM ")


@pytest.mark.slow
def test_a_storm_of_requests() -> None:
    """``python -m tests.stop_storm 10000`` makes more of them."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found = storm(10)
    signal.signal(signal.SIGUSR1, before)
    assert (found.requests, found.at_different_steps, found.missed, found.hung, found.failed) == (10, 0, 0, 0, [])


class Stops:
    """An argument that asks for the stop as it is pickled: there are no ranks then."""

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return int, (0,)


def test_an_early_request_is_heard_at_the_first_look() -> None:
    assert launcher(train, 2, stop_on="USR1")(Stops(), 0, True) == [(1, "USR1")] * 2  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_that_do_not_look_are_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo")

    def deaf() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(caller, signal.SIGUSR1)
        (tmp_path / "fifo").read_text()

    caller = os.getpid()
    ours = launcher(deaf, 2, stop_on="USR1", stop_grace=1.0, max_restarts=1)
    with pytest.raises(LaunchError, match=r"did not stop within 1 s of being asked to at \d\d:\d\d:\d\d \(USR1\): "
                                          r"ranks 0-1 never called mlaunch.stopping\(\)") as caught:  # fmt: skip
        ours()
    assert "ranks 0-1 were in read_text at test_stopping.py" in str(caught.value)
    assert "was asked to stop 0.5 s ago and still runs: ranks 0-1 never called" in capfd.readouterr().err


def test_ranks_stay_after_a_call_that_was_stopped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "there")

    def work() -> tuple[int, str]:
        for step in steps():
            if step == 10 and dist.get_rank() == 0:
                (tmp_path / "there").write_text("x")
            if reason := mlaunch.stopping():
                return step, reason
        raise AssertionError("it was not stopped")

    def ask() -> None:
        (tmp_path / "there").read_text()
        asked.append(ranks.stop())

    asked: list[bool] = []
    with Ranks(n_gpus=2) as ranks:
        pids = ranks.run(os.getpid)
        assert not ranks.stop()  # no call runs
        for _ in range(2):
            thread = threading.Thread(target=ask)
            thread.start()
            first, second = ranks.run(work)
            thread.join()
            assert first == second
            assert first[1] == "asked"
        assert ranks.run(mlaunch.stopping) == ["", ""]
        assert ranks.run(os.getpid) == pids
    assert asked == [True, True]


def test_mlaunch_stop_is_over_with_the_call_though_its_ranks_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "there")

    def work() -> str:
        if dist.get_rank() == 0:
            (tmp_path / "there").write_text("x")
        return next(reason for _ in steps() if (reason := mlaunch.stopping()))

    def stop() -> None:
        (tmp_path / "there").read_text()
        wait_until(lambda: not launches.command("stop"))  # it listens some moments after its start

    with Ranks(n_gpus=2) as ranks, ThreadPoolExecutor(1) as pool:
        pids = ranks.run(os.getpid)
        command = pool.submit(stop)
        assert ranks.run(work) == ["asked"] * 2
        try:
            command.result(60)
        finally:
            stayed = ranks.run(os.getpid)
            ranks.close()  # else the command would wait for that
    assert stayed == pids


def test_mlaunch_stop_waits_for_ranks_that_take_longer_than_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that writes a checkpoint, once it is asked to stop."""
    launches.be_patient(monkeypatch, "answer", 0.1)

    def work() -> str:
        mlaunch.stopping()  # a launch whose ranks have never looked is ended at once
        (tmp_path / "begun").touch()
        reason = next(reason for _ in steps() if (reason := mlaunch.stopping()))
        (tmp_path / "asked").touch()
        while not (tmp_path / "go").exists():
            signal.sigtimedwait([], 0.01)
        return reason

    def stop() -> None:
        wait_until(lambda: not launches.command("stop"))  # it listens some moments after its start

    run = launcher(work, 1).submit()
    wait_until((tmp_path / "begun").exists)
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(stop)
        wait_until((tmp_path / "asked").exists)
        assert not wait([command], 0.5).done
        (tmp_path / "go").touch()
        assert run.result(60) == ["asked"]
        command.result(60)


@pytest.mark.parametrize("now", [False, True])
def test_mlaunch_stop(tmp_path: Path, now: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a launch that looks, without the option."""
    os.mkfifo(tmp_path / "there")
    path = str(tmp_path / "there")

    def work() -> int:
        for step in steps():
            reason = mlaunch.stopping()
            if step == 2 and dist.get_rank() == 0:
                Path(path).write_text("x")
            if reason:
                return step
        raise AssertionError("it was not stopped")

    def ask() -> None:
        Path(path).read_text()
        # It listens some moments after its start.
        wait_until(lambda: not launches.command("stop", *["--now", "--json"] * now))

    thread = threading.Thread(target=ask)
    thread.start()
    ours = launcher(work, 2)
    if now:
        with pytest.raises(LaunchError, match="was ended by mlaunch stop"):
            ours()
    else:
        first, second = ours()
        assert first == second
    thread.join()
    if now:
        (ended,) = json.loads(capsys.readouterr().out)
        schema.check(ended, "launch_that_was_ended")
        assert ended["asked"] == "end"
    else:
        assert "stopping " in capsys.readouterr().out


def work(caller: int, at: int, in_step: bool, path: str) -> tuple[int, str]:
    """As ``train``, and opens the path first on rank 0, for reading: the others wait for it in a barrier."""
    if dist.get_rank() == 0:
        Path(path).read_text()
    dist.barrier()
    return train(caller, at, in_step)


@pytest.mark.slow
def test_a_call_in_another_thread_is_asked_why_and_a_submitted_one_is_stopped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    ours = launcher(work, 2, max_restarts=1)
    assert ours.why() == ""
    run = ours.submit(os.getpid(), 0, True, str(tmp_path / "go"))
    said = (
        r"rank 0 has not entered barrier #\d+ of the default group \(rank 1 waits for it, in barrier at test_stopping"
    )
    wait_until(lambda: re.match(said, ours.why()) is not None)
    wait_until(lambda: re.match(said, run.why()) is not None)
    assert run.stop()
    (tmp_path / "go").write_text("x")
    first, second = run.result(60)
    assert first == second
    assert first[1] == "asked"
    assert not run.stop()
    assert run.why() == ours.why() == ""


@pytest.mark.nightly
@pytest.mark.slow  # torch.distributed.checkpoint alone takes a second to import
def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "checkpoint.py"), run_name="checkpoint")
    usual, caller = example["batch"], os.getpid()

    def batch(step: int) -> Any:
        if step == 4 and dist.get_rank() == 1:
            os.kill(caller, signal.SIGTERM)
        return usual(step)

    train = example["train"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    (first, _), (second, _) = train(parts, 10**6, batch)
    assert first == second >= 4
    assert train.last.stopped.step == first
    assert [path.name for path in parts.iterdir()] == [f"step-{first:06}"]
    again = train(parts, first + 5)
    assert train.last.stopped is None
    assert again == train(whole, first + 5)
    assert again[0] == again[1]
    assert again[0][0] == first + 5


def hold_up(path: str) -> int:
    """Ends once somebody writes; till then rank 1 holds up the other."""
    dist.barrier()
    if dist.get_rank() == 1:
        Path(path).read_text()
    dist.barrier()
    return 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["launch", "ranks", "machines"])
def test_a_stall_is_reported_and_may_end_the_run(where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "go")
    path = str(tmp_path / "go")
    said = rf"rank 1 has not entered barrier #2 of the default group \({WAITS}, in barrier at {HERE}:\d+\); "
    options: dict[str, Any] = {"engine": Threads()} if where == "machines" else {}
    with Ranks(n_gpus=2, stall="0.2 stop") if where == "ranks" else nullcontext() as ranks:
        events: list[dict[str, Any]] = []
        listened = options if where == "ranks" else {**options, "events": events.append}
        ours = launcher(hold_up, 2, stall="0.2 stop", ranks=ranks, **listened)
        with pytest.raises(LaunchError, match=rf"the run of hold_up\(\) made no progress for \d+ s: {said}") as caught:
            ours(path)
        assert caught.value.as_dict()["waited_for"] == [1]
        assert {tuple(event["waited_for"]) for event in events if event["event"] == "stall"} == (
            {(1,)} if listened is not options else set()
        )
    with Ranks(n_gpus=2, stall=0.2) if where == "ranks" else nullcontext() as ranks:
        ours = launcher(hold_up, 2, stall=0.2, ranks=ranks, **options)
        thread = threading.Thread(target=lambda: told.append(ours(path)))
        told: list[list[int]] = []
        thread.start()
        heard: list[str] = []

        def is_reported() -> bool:
            heard.append(capfd.readouterr().err)
            return re.search(rf"hold_up\(\) has made no progress for \d+ s: {said}", "".join(heard)) is not None

        wait_until(is_reported)
        (tmp_path / "go").write_text("x")
        thread.join()
        assert set(told[0]) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("machines", [False, True])
def test_a_deadline_says_who_holds_up_whom(machines: bool) -> None:
    """A rank that returns early, which the others wait for."""

    def uneven() -> None:
        dist.barrier()
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(1))

    for deadline in (5.0, 10.0, 20.0):
        with pytest.raises(LaunchTimeout) as caught:
            launcher(uneven, 2 if machines else 3, deadline=deadline, engine=Threads() if machines else None)()
        second = str(caught.value).splitlines()[1]
        if "ranks" in second:
            break  # else the machine is so busy that one of them has answered too late to be named
    assert second.startswith("rank 1 has returned (ranks 0, 2 wait for it, in all_reduce at test_stopping.py:")
