"""Launches that are prepared for the next call: who takes them, who does not, and what becomes of them otherwise."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import mlaunch
from mlaunch import LaunchError, launcher
from tests import builds, launches
from tests.contract.functions import total
from tests.contract.preparing import LIMIT, pids_of, prepared, preparing
from tests.contract.test_lease_calls import held
from tests.contract.test_process_names import shown
from tests.contract.test_submit import hold, holding
from tests.processes import alive, children, soon, status_of, wait_gone


@pytest.fixture(autouse=True)
def prepare() -> Iterator[None]:
    with preparing():
        yield


def who() -> tuple[int, tuple[str, ...], float]:
    return os.getpid(), tuple(sys.argv), torch.rand(1).item()


def pids(call: launcher[[], tuple[int, tuple[str, ...], float]]) -> list[int]:
    return [pid for pid, _, _ in call()]


def test_the_next_call_takes_what_was_prepared_and_each_call_gets_other_processes() -> None:
    call = launcher(who, 2)
    seen = pids(call)
    for _ in range(3):
        ranks = pids_of(prepared())
        assert pids(call) == ranks
        seen += ranks
    assert len(set(seen)) == len(seen)


def test_a_prepared_launch_serves_other_functions_arguments_and_command_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher(total, 2)()
    ranks = pids_of(prepared())
    monkeypatch.setattr(sys, "argv", ["other.py", "--fast"])
    found = launcher(who, 2, seed=7, deadline=LIMIT)()
    assert [pid for pid, _, _ in found] == ranks
    assert {argv for _, argv, _ in found} == {("other.py", "--fast")}
    assert [random for _, _, random in found] == [random for _, _, random in launcher(who, 2, seed=7)()]
    prepared()
    assert launcher(lambda x, *, y: x + y, 2, results="rank0")(1, y=2) == [3, None]


def test_the_age_of_a_call_counts_from_the_call(tmp_path: Path) -> None:
    """Not from when its launch was prepared."""
    launcher(total, 2)()
    ranks = pids_of(prepared())
    begun = time.monotonic()
    run = launcher(hold, 2).submit(tmp_path, "it")
    assert sorted(holding(tmp_path, "it")) == sorted(ranks)
    [launch] = [one for one in launches.ask("status") if pids_of(one) == ranks]
    assert launch["age"] <= time.monotonic() - begun
    for mark in tmp_path.iterdir():
        mark.unlink()
    assert run.result(LIMIT) == ["it", "it"]


def in_other_surroundings(what: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
    if what == "environment":
        patch.setenv("OTHER", "1")
    elif what == "directory":
        patch.chdir(folder)
    elif what == "path":
        patch.setattr(sys, "path", [*sys.path, str(folder)])
    elif what == "turned off":
        patch.setenv("MLAUNCH_PREPARE", "0")


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "size": {"n_gpus": 1},
    "grace period": {"grace_period": 2.0},
    "env": {"env": {"OTHER": "1"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["environment", "directory", "path", "turned off", *OTHER_OPTIONS])
def test_a_launch_of_another_shape_drops_it(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher(total, 2)()
    launch = prepared()
    in_other_surroundings(what, monkeypatch, tmp_path)
    found = [pid for pid, _, _ in launcher(who, **{"n_gpus": 2, **OTHER_OPTIONS.get(what, {})})()]
    assert not set(found) & set(pids_of(launch))
    wait_gone([launch["agent"], *pids_of(launch)])


@pytest.mark.slow
def test_a_fork_server_of_ones_own_takes_nothing() -> None:
    launcher(total, 2)()
    launch = prepared()
    assert not set(pids(launcher(who, 2, start_method="fork"))) & set(pids_of(launch))
    assert pids(launcher(who, 2)) == pids_of(launch)


def cores(pid: int) -> set[int]:
    return os.sched_getaffinity(pid)


@pytest.mark.slow
def test_ranks_wait_each_on_a_core_and_run_on_all() -> None:
    """Woken at once, they would else begin one after the other on the core of who wakes them."""
    all_cores = cores(0)
    call = launcher(functools.partial(cores, 0), 2)
    call()
    waiting = [cores(pid) for pid in pids_of(prepared())]
    assert [len(one) for one in waiting] == [1, 1]
    assert len(set.union(*waiting)) == min(2, len(all_cores))
    assert call() == [all_cores] * 2


@pytest.mark.slow
@builds.silent
def test_a_prepared_launch_as_others_see_it(capfd: pytest.CaptureFixture[str]) -> None:
    launcher(total, 2)()
    launch = prepared()
    ours = [launch["agent"], *pids_of(launch)]
    assert not set(children(os.getpid())) & set(ours)
    call = launcher(total, 2)
    call()
    assert call.last is not None
    assert not {"rendezvous", "import"} & {span.phase for rank in call.last.ranks for span in rank.spans}
    assert capfd.readouterr() == ("", "")


def wait_stopped(pid: int) -> None:
    until = time.monotonic() + LIMIT
    while status_of(pid)[0] != "T":
        assert time.monotonic() < until
        signal.sigtimedwait([], 0.01)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("agent", signal.SIGKILL),
        ("rank", signal.SIGKILL),
        ("fork server", signal.SIGKILL),
        ("agent", signal.SIGSTOP),
        ("fork server", signal.SIGSTOP),
    ],
)
def test_no_call_notices_a_prepared_process_that_dies_or_is_stopped(
    victim: str, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher(total, 2)()
    launch, server = prepared(), launches.fork_server().pid
    pid = {"agent": launch["agent"], "rank": pids_of(launch)[1], "fork server": server}[victim]
    os.kill(pid, number)
    if number is signal.SIGKILL:
        wait_gone([pid])
    else:
        wait_stopped(pid)
    call = launcher(who, 2)
    try:
        assert not set(pids(call)) & set(pids_of(launch))
    finally:
        if number is signal.SIGSTOP and launches.is_stopped(pid):
            os.kill(pid, signal.SIGCONT)
    wait_gone([launch["agent"], *pids_of(launch)])
    assert launcher(total, 2)() == [2.0, 2.0]
    assert "error" not in capfd.readouterr().err.lower()


def test_the_first_launch_can_be_prepared_too() -> None:
    with pytest.raises(TypeError, match="n_gpus"):
        mlaunch.warm_up(n_gpu=2, preload=["large"])  # type: ignore[call-arg]
    assert launches.preloaded() == ()  # nothing of a call that is wrong counts
    mlaunch.warm_up(n_gpus=2)
    ranks = pids_of(prepared())
    assert pids(launcher(who, 2)) == ranks


@pytest.mark.slow
def test_a_failure_of_a_prepared_launch_is_a_launchs() -> None:
    def fail() -> None:
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    launcher(total, 2)()
    launch = prepared()
    with pytest.raises(LaunchError, match=r"fail\(\)") as caught:
        launcher(fail, 2)()
    assert caught.value.failures[0].pid == pids_of(launch)[1]
    wait_gone([launch["agent"], *pids_of(launch)])


@pytest.mark.slow
def test_interrupts_of_a_call_on_what_was_prepared() -> None:
    def press() -> None:
        os.kill(int(os.environ["CALLER"]), signal.SIGINT)
        signal.pause()

    os.environ["CALLER"] = str(os.getpid())
    try:
        launcher(total, 2)()
        ranks = pids_of(prepared())
        with pytest.raises(KeyboardInterrupt):
            launcher(press, 2)()
        wait_gone(ranks)
        assert launcher(total, 2)() == [2.0, 2.0]
    finally:
        del os.environ["CALLER"]


@pytest.mark.slow
def test_an_argument_that_cannot_be_pickled() -> None:
    launcher(total, 2)()
    launch = prepared()
    with pytest.raises(TypeError, match="argument 0 of len"):
        launcher(len, 2)(threading.Lock())  # type: ignore[arg-type]
    wait_gone(pids_of(launch))
    assert launcher(total, 2)() == [2.0, 2.0]


@pytest.mark.slow
def test_calls_in_threads() -> None:
    launcher(total, 2)()
    prepared()
    results: list[list[float]] = []
    threads = [threading.Thread(target=lambda: results.append(launcher(total, 2)())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert results == [[2.0, 2.0]] * 4


@pytest.mark.nightly("os*")
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_the_end_of_a_caller_that_has_one_prepared(run_script: Any, end: str) -> None:
    done = run_script(
        "import os\n"
        "from mlaunch import launcher\n"
        "from tests.contract.functions import total\n"
        "from tests.contract.preparing import pids_of, prepared\n"
        "launcher(total, 2)()\n"
        "launch = prepared()\n"
        "print(launch['agent'], *pids_of(launch), flush=True)\n" + end
    )
    assert len(done.stdout.split()) == 3, done.stderr
    wait_gone([int(pid) for pid in done.stdout.split()], LIMIT)


class Told:
    """Notes that it was unpickled."""

    seen: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return Told.seen.append, ("unpickled",)


@pytest.mark.slow
@pytest.mark.parametrize("end", [launcher(int, 2), launches.drop_prepared], ids=["taken", "dropped"])
def test_a_number_that_others_have_taken_is_not_asked_for_what_was_prepared(end: Callable[[], object]) -> None:
    with preparing():
        launcher(int, 2)()
        prepared()
        waiting = launches.prepared_launch()
        assert waiting is not None
        number, (stranger, other) = waiting.channel.fileno(), launches.channels()
        other.send(Told())
        os.dup2(stranger.fileno(), number)
        assert end() in ([0, 0], None)
        assert Told.seen == []
        os.close(number)  # it was left to its owner
        stranger.close()
        other.close()


def hold_what_it_has(folder: Path, name: str) -> str:
    hold(folder, name)
    return os.environ["MLAUNCH_LEASED"]


@pytest.mark.slow
def test_a_trial_takes_what_was_prepared_while_another_ran_and_all_its_processes_hold_the_lease(tmp_path: Path) -> None:
    names, expected, agent = ["first", "second", "third"], list[int](), 0
    runs = launcher(hold_what_it_has, n_gpus=2, concurrent=1).map([tmp_path] * 3, names)
    for name in names:
        pids = holding(tmp_path, name)
        if name != "first":
            assert sorted(pids) == sorted(expected)
            assert [held(pid) for pid in (*pids, agent)] == [["device.place%20on%20the%20CPUs%200"]] * 3
        if name != "third":
            launch = prepared()
            expected, agent = pids_of(launch), launch["agent"]
            assert not any(held(pid) for pid in (*expected, agent))
        for pid in pids:
            (tmp_path / f"{name}-{pid}").unlink()
    assert runs.results(LIMIT) == [["place on the CPUs 0"] * 2] * 3
    for run in runs:
        assert run.report is not None
        assert run.report.ranks[0].seconds("wait") < run.report.seconds  # type: ignore[operator]


@pytest.mark.slow
def test_a_resting_agent_holds_nothing_of_a_call_that_was_prepared(tmp_path: Path) -> None:
    """A stopped fork server cannot end it, so it rests: without devices, streams and directory of the call."""
    launcher(int, 2)()
    launch = prepared()
    run = launcher(hold, n_gpus=2, concurrent=1).submit(tmp_path, "it")
    pids = holding(tmp_path, "it")
    assert sorted(pids) == sorted(pids_of(launch))
    agent = launch["agent"]
    assert (len(held(agent)), shown(agent)[0]) == (1, "mlaunch: agent of hold() ")
    server = launches.server_pid()
    os.kill(server, signal.SIGSTOP)
    try:
        for pid in pids:
            (tmp_path / f"it-{pid}").unlink()
        assert run.result(LIMIT) == ["it", "it"]
        assert soon(lambda: held(agent) == [])
        assert soon(lambda: os.readlink(f"/proc/{agent}/cwd") == "/")
        assert [os.readlink(f"/proc/{agent}/fd/{number}") for number in (1, 2)] == [os.devnull] * 2
        assert alive(agent)
    finally:
        os.kill(server, signal.SIGCONT)


UNLUCKY = """
import mlaunch, os, sys
from mlaunch import launcher
END = {
    "colorsys": lambda: 1 / 0,
    "mailbox": lambda: os._exit(1),
    "xmlrpc.server": lambda: os.kill(os.getpid(), 9),
}

@launcher(n_gpus=1, device_type="cpu", output="none")
def train(module, ends):
    there = module in sys.modules
    if ends:
        __import__(module)
        END[module]()
    return there

for module in END:
    try:
        train(module, True)
    except (ZeroDivisionError, mlaunch.LaunchError):
        pass
    print(module, any(train(module, False)[0] for _ in range(50)))
"""


@pytest.mark.nightly
def test_what_a_call_has_imported_is_learnt_though_it_failed(run_script: Any) -> None:
    """It raised, exited, or was killed, as at its deadline."""
    assert run_script(UNLUCKY).stdout.splitlines() == ["colorsys True", "mailbox True", "xmlrpc.server True"]
