"""``mlaunch ps``, ``stacks`` and ``stop``, on launches that run meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, RanksLost, launcher
from tests import builds, launches, schema
from tests.conftest import ROOT
from tests.processes import wait_until
from tests.users import users_environ

HERE = os.path.basename(__file__)
LIMIT = 60.0  # seconds
UNDISTURBED = [1, 2, 3]


@pytest.fixture(autouse=True)
def no_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own place alone: another launch of this user may run, and would be found in the usual ones."""
    launches.hide_other_launches(monkeypatch)


@contextlib.contextmanager
def running(
    tmp_path: Path, first: Callable[[], object] = int, name: str = "", **options: Any
) -> Iterator[dict[str, Any]]:
    """A launch of three ranks, all in their function: rank 2 waits in an event, the others in a barrier for it.

    They do ``first`` before. Afterwards it must return what it would have returned unobserved.
    """
    there, go = tmp_path / "there", tmp_path / "go"
    for fifo in (there, go):
        os.mkfifo(fifo)

    def train() -> int:
        first()
        dist.barrier()
        if dist.get_rank() == 2:
            there.write_text("x")
            wait_for(go)
        dist.barrier()
        return dist.get_rank() + 1

    train.__qualname__ = name or train.__qualname__
    seen: dict[str, Any] = {}

    def listens() -> bool:
        seen["status"] = next(iter(launches.ask("status")), None)
        return seen["status"] is not None

    ours = launcher(train, 3, **options)
    thread = threading.Thread(target=lambda: seen.update(returned=ours()))
    thread.start()
    there.read_text()
    wait_until(listens)  # which begins some moments after its start
    try:
        yield seen
    finally:
        go.write_text("x")
        thread.join()
    assert seen["returned"] == UNDISTURBED


def wait_for(go: Path) -> None:
    go.read_text()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_ps_lists_what_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], start_method: str) -> None:
    with running(tmp_path, start_method=start_method):
        assert launches.command("ps") == 0
        title, origin, header, *rows = capsys.readouterr().out.splitlines()
        assert re.fullmatch(
            rf"[0-9a-f]{{8}}  running\.<locals>\.train\(\)  3 ranks, \d+ s old, called by pid {os.getpid()}", title
        )
        assert origin == f"  {launches.source_of_calls()} in {os.getcwd()}"
        assert header.split() == ["RANK", "PID", "DEVICE", "STATE"]
        for rank, row in enumerate(rows):
            number, pid, device, state = row.split(maxsplit=3)
            assert (int(number), device, state) == (rank, "cpu", "running the function")
            os.kill(int(pid), 0)
        assert launches.command("ps", "--json") == 0
        (status,) = json.loads(capsys.readouterr().out)
        schema.check(status, "launch")
        assert status["cwd"] == os.getcwd()
        assert status["argv"] == sys.argv
        assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]
    assert launches.command("ps") == 0
    assert capsys.readouterr().out.startswith("no launch of this user is running here (looked in /")


def test_ps_tells_what_runs_on_ranks_that_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, go = tmp_path / "there", tmp_path / "go"
    for fifo in (there, go):
        os.mkfifo(fifo)

    def step() -> None:
        there.write_text("x")
        wait_for(go)

    step.__qualname__ = "step"
    with Ranks(n_gpus=1) as ranks:
        future = ranks.submit(step)
        there.read_text()
        wait_until(lambda: bool(launches.ask("status")))
        assert launches.command("ps") == 0
        assert capsys.readouterr().out.splitlines()[1].endswith(f" in {os.getcwd()}: runs step()")
        go.write_text("x")
        future.result()
        (launch,) = launches.ask("status")
        while launch["call"] is not None:  # its rank has answered, and is not back yet
            (launch,) = launches.ask("status")


@pytest.mark.slow
def test_stacks_are_shown_and_ranks_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as seen:
        whole, told = 0, ""
        for _ in range(20):  # a busy machine may need longer than a rank is waited for
            assert launches.command("stacks", seen["status"]["id"][:4]) == 0
            told = capsys.readouterr().out
            both = (
                f"ranks 0-1: running the function, in barrier at {HERE}:",
                f"rank 2: running the function, in read_text at {HERE}:",
            )
            whole += all(told.count(line) == 1 for line in both)
            if whole == 3:
                break
        assert whole == 3, told
        assert re.search(
            rf'    File ".*{HERE}", line \d+, in train\n    File ".*{HERE}", line \d+, in wait_for\n', told
        )
        assert launches.command("stacks", "--all-threads") == 0
        told = capsys.readouterr().out
        assert told.count("Current thread 0x") == 3
        for flags in ([], ["--all-threads"]):
            assert launches.command("stacks", "--json", *flags) == 0
            (seen_by_programs,) = json.loads(capsys.readouterr().out)
            schema.check(seen_by_programs, "launch_with_stacks")
            assert [("stacks" in rank) for rank in seen_by_programs["ranks"]] == [bool(flags)] * 3
        assert launches.command("stacks", "zz") == 1
        ours = seen["status"]["id"][:8]
        assert (
            capsys.readouterr().err == f"mlaunch: no running launch has an ID that starts with 'zz'; running: {ours}\n"
        )
    assert launches.command("stacks") == 0
    assert capsys.readouterr().out.startswith("no launch of this user is running here (looked in")


@pytest.mark.slow
def test_why_a_launch_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 2 has not come to the barrier in which the others wait for it."""
    told = ""
    words = re.compile(
        rf"rank 2 has not entered barrier #2 of the default group \(ranks 0-1 wait for it, in barrier at {HERE}:\d+\); "
        rf"rank 2 is in read_text at {HERE}:\d+"
    )
    with running(tmp_path) as seen:
        for _ in range(20):  # a busy machine may need longer than a rank is waited for
            assert launches.command("why", seen["status"]["id"][:4]) == 0
            told = capsys.readouterr().out
            if words.search(told):
                break
        assert words.search(told), told
        assert launches.command("why", "--json", "--caller", str(os.getppid())) == 0
        (found,) = json.loads(capsys.readouterr().out)
        schema.check(found, "launch_with_reason")
        assert words.search(found["why"])
        assert found["waited_for"] == [2]
        assert "read_text" in [frame["function"] for frame in found["ranks"][2]["frames"]]
        pid = int(seen["status"]["ranks"][2]["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            assert launches.command("why") == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        told = capsys.readouterr().out
        assert "rank 2 does not answer (ranks 0-1 wait for it, in barrier at " in told
        assert "rank 2 was running the function (it was stopped by a signal)" in told
    assert launches.command("why", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def work_in_a_thread() -> None:
    def deep(left: int) -> int:
        return deep(left - 1) + 1 if left else 0

    def work() -> None:
        while True:
            deep(200)

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.nightly
@pytest.mark.slow
def test_stacks_of_ranks_whose_threads_work(tmp_path: Path) -> None:
    """Their frames are not read, since they go while they are."""
    with running(tmp_path, work_in_a_thread):
        for _ in range(100):
            [told] = launches.ask("stacks")
            assert {rank["state"] for rank in told["ranks"]} == {"running the function"}


@pytest.mark.slow
def test_the_state_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as seen:
        held = seen["status"]["ranks"][0]["pid"]
        os.kill(held, signal.SIGSTOP)
        told = "(it was stopped by a signal)"
        wait_until(lambda: told in launches.ask("status")[0]["ranks"][0]["state"])
        assert launches.command("stacks") == 0
        told = capsys.readouterr().out
        os.kill(held, signal.SIGCONT)
    assert "  rank 0: running the function (it was stopped by a signal)\n  rank 1: running" in told


def test_the_command_itself(tmp_path: Path) -> None:
    with running(tmp_path) as seen:
        for command in ([sys.executable, "-m", "mlaunch"], [str(Path(sys.executable).with_name("mlaunch"))]):
            done = subprocess.run([*command, "ps"], capture_output=True, text=True, check=True, cwd=ROOT)
            assert seen["status"]["id"][:8] in [line.split()[0] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_a_terminal_cannot_show(tmp_path: Path, encoding: str) -> None:
    environ = {**users_environ(), "PYTHONIOENCODING": f"{encoding}:strict", "PYTHONPATH": str(ROOT)}
    with running(tmp_path, name="träin \udcfc"):
        for word in ("ps", "stacks"):
            command = [sys.executable, "-m", "mlaunch", word]
            done = subprocess.run(command, capture_output=True, check=True, env=environ, timeout=LIMIT)
            assert "träin \udcfc()".encode(encoding, "backslashreplace") in done.stdout


def test_help_needs_no_torch() -> None:
    code = (
        "import runpy, sys\nsys.argv[1:] = ['--help']\n"
        "try: runpy.run_module('mlaunch', run_name='__main__')\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("False\n")


def test_a_killed_agent_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def train() -> None:
        while not list(tmp_path.glob("mlaunch/*.sock")):
            os.sched_yield()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(LaunchError, match="the agent was killed by SIGKILL"):
        launcher(train, 1)()
    assert os.listdir(tmp_path / "mlaunch") == []


def test_a_directory_with_a_long_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 200)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with running(tmp_path) as seen:
        assert os.listdir(deep / "mlaunch") == [f"{seen['status']['id']}.sock"]
    assert os.listdir(deep / "mlaunch") == []


@builds.silent
def test_a_directory_that_others_can_enter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mlaunch").mkdir(mode=0o755)
    assert launcher(lambda: 5, 1)() == [5]  # a launch needs no visitors
    assert launches.command("ps") == 1
    assert capsys.readouterr().err == (
        f"mlaunch: {tmp_path}/mlaunch must belong to this user with mode 0700, but it belongs to uid {os.getuid()} "
        f"with mode 0755; set XDG_RUNTIME_DIR to a directory of yours, or remove it\n"
    )


def test_a_strangers_directory_elsewhere_hides_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Anybody can make one of the usual places, before this user does."""
    strange = tmp_path / "strange"
    strange.mkdir(mode=0o777)
    strange.chmod(0o777)
    launches.hide_other_launches(monkeypatch, launches.runtime_directory(), strange)
    with running(tmp_path) as seen:
        assert [status["id"] for status in launches.ask("status")] == [seen["status"]["id"]]


def wait_for_ever() -> None:
    while True:
        signal.pause()


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Ends the launch that the block makes, once it runs."""

    def stop() -> int:
        wait_until(lambda: bool(launches.ask("status")))
        return launches.command("stop")

    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(stop)
        yield
        assert stopped.result(LIMIT) == 0


def test_stop_ends_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """Its caller hears of it; it is not started again."""
    told = rf"^the run of wait_for_ever\(\) was ended by mlaunch stop \(pid {os.getpid()}\)"
    with stopping(), pytest.raises(LaunchError, match=told):
        launcher(wait_for_ever, 2, max_restarts=3)()
    assert re.match(r"stopping [0-9a-f]{8}  wait_for_ever\(\)  2 ranks", capsys.readouterr().out)
    assert launches.command("ps") == 0


def test_stop_ends_ranks_that_stay() -> None:
    with Ranks(n_gpus=2, restart=False) as ranks:
        assert ranks.run(int) == [0, 0]
        with stopping(), pytest.raises(LaunchError, match=r"the run of wait_for_ever\(\) was ended by mlaunch stop"):
            ranks.run(wait_for_ever)
        with pytest.raises(RanksLost, match=r"was ended by mlaunch stop"):
            ranks.run(int)


@pytest.mark.slow
@builds.silent
def test_stop_of_what_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.command("stop") == 1
    assert capsys.readouterr().err.startswith("mlaunch: no launch of this user is running here")
    for words in (["stop", ""], ["why", "--caller", "me"]):
        with pytest.raises(SystemExit):
            launches.command(*words)
    told = capsys.readouterr().err
    assert "'' is no ID (a shell variable that is not set?)" in told
    assert "argument --caller: me: allowed: the number of a process" in told
    with running(tmp_path) as seen, Ranks(n_gpus=1) as ranks:
        ranks.run(int)
        wait_until(lambda: len(launches.ask("status")) == 2)
        for words, told in (
            (["stop", "zz"], "mlaunch: no running launch has an ID that starts with 'zz'; running:\n"),
            (["stop"], " launches are running; say which one, such as mlaunch stop "),
            (["stop", "--caller", str(os.getpid())], " launches are running; say which one, such as mlaunch stop "),
            (["stop", "--caller", str(ranks.run(os.getpid)[0])], " has no launch running here; "),
        ):
            assert launches.command(*words) == 1
            error = capsys.readouterr().err
            assert told in error
            assert seen["status"]["id"][:8] in error


def test_launches_are_listed_beside_leases_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leases").mkdir(mode=0o755)
    (tmp_path / "leases").chmod(0o755)
    monkeypatch.setenv("MLAUNCH_LEASE_DIR", str(tmp_path / "leases"))
    assert launches.command("ps") == 1
    said = capsys.readouterr()
    assert "no launch of this user is running here" in said.out
    assert said.err.endswith(f"with mode 0755: chmod 700 {tmp_path / 'leases'}\n")


@pytest.mark.slow
def test_visitors_that_misbehave(tmp_path: Path) -> None:
    """Silent ones, those that leave at once, those that speak nonsense, those that do not listen."""
    with running(tmp_path) as seen:
        path = str(launches.runtime_directory() / f"{seen['status']['id']}.sock")
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
        for visitor, word in zip(silent, [b"", b"x" * 5000, b"stacks", b"status"] * 10, strict=True):
            visitor.connect(path)
            if word:
                visitor.send(word)
        for visitor in silent[::2]:
            visitor.close()
        assert launches.ask("status")[0]["id"] == seen["status"]["id"]
        for visitor in silent[1::2]:
            visitor.close()
