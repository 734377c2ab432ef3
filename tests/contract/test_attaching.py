"""``mlaunch debug``: a debugger that comes from another terminal to ranks that run, and every way out of it."""

from __future__ import annotations

import os
import pdb
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.processes import soon, wait_until
from tests.system import commands
from tests.terminal import Terminal

COMMAND = "import runpy, sys\nsys.argv.insert(1, 'debug')\nrunpy.run_module('mlaunch', run_name='__main__')\n"
VISITOR = "is debugged by mlaunch debug (pid "


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks show places without colours."""
    monkeypatch.setenv("TERM", "dumb")


def count(go: Path, *, apart: bool = False) -> int:
    """Runs Python, with a collective in each turn unless ``apart``, until there is a file."""
    turns, done = 0, False
    while not done:
        turns = turns + 1
        ends = torch.tensor(int(go.exists()))
        if not apart:
            dist.all_reduce(ends)
        done = bool(ends.item())
    return turns


def count_and_look(go: Path) -> tuple[int, bool]:
    """And whether all that a debugger changes in a rank is as before at the end."""
    before = sys.breakpointhook, pdb.set_trace, sys.gettrace()
    turns = count(go)
    return turns, (sys.breakpointhook, pdb.set_trace, sys.gettrace()) == before


def submit(function: Callable[..., Any], *args: object, **kwargs: object) -> Future[Any]:
    """Calls it in a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def ours() -> list[dict[str, Any]]:
    """Returns the launches that this test has made: other programs' may run, too."""
    return [one for one in launches.ask("status") if one["caller"] == os.getpid() or "test_" in one["cwd"]]


def running_id() -> str:
    """Returns the ID of the launch, once its ranks run what they are to run."""
    while not (found := ours()) or not all(map(is_ready, found[0]["ranks"])):
        os.sched_yield()
    return str(found[0]["id"])


def is_ready(rank: Any) -> bool:
    return bool(rank["state"].startswith(("running", "waiting for a call")))


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Makes terminals in which ``mlaunch debug`` runs, once there is a launch."""
    made: list[Terminal] = []

    def attach(*args: str) -> Terminal:
        launch_id = running_id()
        (tmp_path / "attach.py").write_text(COMMAND)
        made.append(Terminal(tmp_path / "attach.py", launch_id, *args))
        return made[-1]

    yield attach
    (tmp_path / "go").touch()
    for terminal in made:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()


def prompt(terminal: Terminal, rank: int) -> str:
    return terminal.until(f"(Pdb, rank {rank}) ")


def test_all_ranks_of_a_running_call(tmp_path: Path, terminals: Callable[..., Terminal]) -> None:
    """Each stops in the user's frame; their variables are shown and changed; ``all`` steps them, and they go on."""
    future = submit(launcher(count, 2, device_type="cpu", timeout=60), tmp_path / "go", apart=True)
    terminal = terminals()
    assert "ranks 0-1 of count() to stop at the next line" in terminal.until("\n")
    first = terminal.until("(Pdb, rank ") + terminal.until(") ")
    assert "test_attaching.py(" in first
    assert "count()\n-> " in first
    rank = int(first.rpartition("rank ")[2][0])
    seen = ""
    while seen.count("has stopped at test_attaching.py:") < 2:
        terminal.type("who")
        seen = prompt(terminal, rank)
    terminal.type("all turns = -1000000")
    prompt(terminal, rank)
    (tmp_path / "go").write_text("")
    terminal.type("all n")
    terminal.until("(Pdb, rank ")
    terminal.type("all detach")
    assert terminal.end() == 0
    assert all(-1000000 <= turns < 0 for turns in future.result())


@pytest.mark.parametrize("way", ["c and Ctrl-C", "detach", "\x03", "\x04", "closed", "killed"])
def test_ways_out(
    tmp_path: Path, terminals: Callable[..., Terminal], capfd: pytest.CaptureFixture[str], way: str
) -> None:
    """The ranks go on, the next visitor is served like the first one, and the values are right."""
    future = submit(launcher(count_and_look, 2, device_type="cpu"), tmp_path / "go")
    terminal = terminals("1")
    prompt(terminal, 1)
    if way == "closed":
        terminal.close()
    elif way == "killed":
        terminal.process.kill()
    elif way == "c and Ctrl-C":
        terminal.type("b count")
        prompt(terminal, 1)
        terminal.type("c")
        terminal.type("\x03")
    else:
        terminal.type(way)
    terminal.process.wait()
    if way not in {"closed", "killed"}:
        assert terminal.end() == 0
    again = terminals("1")
    prompt(again, 1)
    (tmp_path / "go").write_text("")
    again.type("detach")
    assert again.end() == 0
    (first, as_before), other = future.result()
    assert other == (first, True)
    assert as_before
    told = capfd.readouterr().err
    assert told.count(VISITOR) == 2, told


def hooks() -> tuple[object, ...]:
    return sys.breakpointhook, pdb.set_trace, sys.gettrace()


def go_on(folder: Path) -> str:
    """Runs until there is a file; says by others, if its visitor wants that, that it has left the prompt, and how."""
    before, left = hooks(), None
    while not (folder / "go").exists():
        if left is not None:
            (folder / left).touch()
        if hooks() == before:
            (folder / "as before").touch()
    try:
        breakpoint()
    except RuntimeError as error:
        return str(error)
    return "a prompt"


def test_a_visitor_who_is_killed_after_c_leaves_all_as_before(
    tmp_path: Path, terminals: Callable[..., Terminal]
) -> None:
    """Also what traces, for a breakpoint of his, a rank that is at no prompt."""
    future = submit(launcher(go_on, 1, device_type="cpu"), tmp_path)
    terminal = terminals("0")
    prompt(terminal, 0)
    terminal.type("b hooks, False")
    prompt(terminal, 0)
    terminal.type("left = 'left'")
    prompt(terminal, 0)
    terminal.type("c")
    wait_until((tmp_path / "left").exists)
    (tmp_path / "as before").unlink()
    terminal.process.kill()
    assert soon((tmp_path / "as before").exists)
    (tmp_path / "go").touch()
    assert "has no terminal" in future.result()[0]


def test_q_ends_the_launch(tmp_path: Path, terminals: Callable[..., Terminal]) -> None:
    future = submit(launcher(count, 2, device_type="cpu"), tmp_path / "go")
    terminal = terminals()
    terminal.until("(Pdb, rank ")
    terminal.type("q")
    terminal.until("ended")
    assert terminal.end() == 0
    with pytest.raises(LaunchError, match=rf"was ended by mlaunch debug \(pid {terminal.process.pid}\)"):
        future.result()


def test_the_launch_ends_under_the_prompt(tmp_path: Path, terminals: Callable[..., Terminal]) -> None:
    """A rank is killed: the prompt is withdrawn."""
    future = submit(launcher(count, 2, device_type="cpu"), tmp_path / "go")
    terminal = terminals()
    terminal.until("(Pdb, rank ")
    (status,) = ours()
    os.kill(status["ranks"][0]["pid"], signal.SIGKILL)
    assert terminal.end() == 0
    with pytest.raises(LaunchError, match=r"rank 0 of count\(\) was killed by SIGKILL"):
        future.result()


def wait_in_c(there: Path, go: Path) -> float:
    """Rank 1 waits for a file, the others for rank 1."""
    if dist.get_rank() == 1:
        there.write_text("x")
        go.read_text()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def test_a_rank_inside_c(tmp_path: Path, terminals: Callable[..., Terminal]) -> None:
    """It is told of, and of who waits already; it stops when it is back."""
    there, go = tmp_path / "there", tmp_path / "go"
    for fifo in (there, go):
        os.mkfifo(fifo)
    future = submit(launcher(wait_in_c, 2, device_type="cpu", timeout=50), there, go)
    there.read_text()
    while not any("all_reduce" in str(rank["frames"]) for rank in why()):
        os.sched_yield()
    terminal = terminals("1")
    terminal.until("rank 0 waits already, in all_reduce at test_attaching.py:")
    terminal.until("this operation keeps its limit, and fails 50 s after it began")
    terminal.until("rank 1 has run no line of yours for ")
    go.write_text("x")
    assert "wait_in_c()\n-> go.read_text()" in prompt(terminal, 1)
    terminal.type("detach")
    assert terminal.end() == 0
    assert future.result() == [1.0, 1.0]


def why() -> list[Any]:
    return [rank for launch in launches.ask("why", running_id()) for rank in launch["ranks"]]


def double(number: int) -> int:
    twice = 2 * number
    return twice  # noqa: RET504 - a line to step to


def test_ranks_that_stay(terminals: Callable[..., Terminal]) -> None:
    """Those at rest stop at the first line of the next call, and not in what they do themselves before it."""
    with Ranks(n_gpus=2, device_type="cpu") as ranks:
        assert ranks.run(double, 1) == [2, 2]
        terminal = terminals()
        terminal.until("rank 0 has run no line of yours")
        future = ranks.submit(double, 4)
        first = terminal.until("(Pdb, rank ") + terminal.until(") ")
        assert "double()\n-> twice = 2 * number" in first
        terminal.type("all number = 5")
        terminal.until(") ")
        terminal.type("all c")
        values = future.result()
        assert set(values) <= {8, 10}
        again = ranks.submit(double, 6)
        terminal.type("\x03")
        assert terminal.end() == 0
        assert again.result() == [12, 12]
        assert ranks.run(double, 7) == [14, 14]


SCRIPT = """
import pathlib, sys
turns, go = 0, pathlib.Path(sys.argv[1])
while not go.exists():
    turns = turns + 1
print("turns", turns < 0)
"""


def test_mlaunch_run(tmp_path: Path, terminals: Callable[..., Terminal]) -> None:
    go = tmp_path / "go"
    script = commands.start(tmp_path, "--nproc-per-node", "2", commands.write(tmp_path, SCRIPT), str(go))
    terminal = terminals("0")
    assert "train.py(" in prompt(terminal, 0)
    terminal.type("turns = -10**12")
    prompt(terminal, 0)
    terminal.type("breakpoint")
    prompt(terminal, 0)
    go.write_text("")
    terminal.type("detach")
    assert terminal.end() == 0
    out, err = script.communicate()
    assert script.returncode == 0, err
    assert out.count("turns True") == 1
    assert out.count("turns False") == 1


def test_bad_input(
    tmp_path: Path,
    terminals: Callable[..., Terminal],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(*args: str) -> str:
        assert launches.command("debug", *args) == 1
        return capsys.readouterr().err

    future = submit(launcher(count, 2, device_type="cpu"), tmp_path / "go")
    name = running_id()
    assert "no running launch has an ID that starts with 'zzz'; running:" in told("zzz")
    assert "other users', are not seen here" in told("zzz")
    assert "rank 7: on this machine count() has ranks 0-1" in told(name, "7")
    assert "standard input and output must be a terminal" in told(name, "1")
    with pytest.raises(SystemExit):
        launches.command("debug", name, "one")
    assert "one: allowed: a rank, or ranks with commas" in capsys.readouterr().err
    terminal = terminals()
    terminal.until("(Pdb, rank ")
    other = terminals()
    assert f"is debugged already, by process {terminal.process.pid}" in other.until("\n")
    assert other.end() == 1
    (tmp_path / "go").write_text("")
    terminal.type("\x03")
    terminal.end()
    future.result()
    launches.hide_other_launches(monkeypatch, tmp_path)
    assert f"no launch of this user is running here (looked in {tmp_path})" in told()


def test_without_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The only launch is taken; several are listed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    launches.hide_other_launches(monkeypatch, tmp_path / "mlaunch")
    first = submit(launcher(count, 2, device_type="cpu"), tmp_path / "go")
    running_id()
    assert launches.command("debug") == 1
    assert "standard input and output must be a terminal" in capsys.readouterr().err
    second = submit(launcher(count, 1, device_type="cpu"), tmp_path / "go")
    while len(found := ours()) < 2:
        os.sched_yield()
    assert launches.command("debug") == 0
    said = capsys.readouterr().out
    assert all(f"{launch['id'][:8]}  count()" in said for launch in found)
    assert "say which one, and a rank if you like: mlaunch debug " in said
    (tmp_path / "go").write_text("")
    assert len(set(first.result())) == 1
    second.result()
