"""``mlaunch ps``, ``stacks`` and ``stop``, on launches that run meanwhile."""

from __future__ import annotations

import contextlib
import errno
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
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, RanksLost, launcher
from mlaunch.base import linux
from mlaunch.base.text import in_two_units
from mlaunch.caller import running_launches
from mlaunch.caller.report import notebook
from mlaunch.cli import main, ps_and_stacks
from mlaunch.protocol import registry
from mlaunch.protocol.visitors import END, STATUS, Reception, answer
from tests import builds
from tests.conftest import ROOT
from tests.users import users_environ

HERE = os.path.basename(__file__)
LIMIT = 60.0  # seconds
UNDISTURBED = [1, 2, 3]


@pytest.fixture(autouse=True)
def no_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own place alone: another launch of this user may run, and would be found in the usual ones."""
    usual = registry.candidates
    monkeypatch.setattr(registry, "candidates", lambda environ: usual(environ)[:1])


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
    ours = launcher(train, 3, **options)
    thread = threading.Thread(target=lambda: seen.update(returned=ours()))
    thread.start()
    there.read_text()
    while not (found := ps_and_stacks.ask(b"status")):  # it listens some moments after its start
        os.sched_yield()
    seen["status"] = found[0]
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
        assert main(["ps"]) == 0
        title, origin, header, *rows = capsys.readouterr().out.splitlines()
        assert re.fullmatch(
            rf"[0-9a-f]{{8}}  running\.<locals>\.train\(\)  3 ranks, \d+ s old, called by pid {os.getpid()}", title
        )
        assert origin == f"  {notebook.source()} in {os.getcwd()}"
        assert header.split() == ["RANK", "PID", "DEVICE", "STATE"]
        for rank, row in enumerate(rows):
            number, pid, device, state = row.split(maxsplit=3)
            assert (int(number), device, state) == (rank, "cpu", "running the function")
            os.kill(int(pid), 0)
        assert main(["ps", "--json"]) == 0
        (status,) = json.loads(capsys.readouterr().out)
        assert status["cwd"] == os.getcwd()
        assert status["argv"] == sys.argv
        assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]
    assert main(["ps"]) == 0
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
        while not ps_and_stacks.ask(STATUS):
            os.sched_yield()
        assert main(["ps"]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith(f" in {os.getcwd()}: runs step()")
        go.write_text("x")
        future.result()
        (launch,) = ps_and_stacks.ask(STATUS)
        while launch["call"] is not None:  # its rank has answered, and is not back yet
            (launch,) = ps_and_stacks.ask(STATUS)


@pytest.mark.slow
def test_stacks_are_shown_and_ranks_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as seen:
        whole, told = 0, ""
        for _ in range(20):  # a busy machine may need longer than a rank is waited for
            assert main(["stacks", seen["status"]["id"][:4]]) == 0
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
        assert main(["stacks", "--all-threads"]) == 0
        told = capsys.readouterr().out
        assert told.count("Current thread 0x") == 3
        assert main(["stacks", "zz"]) == 1
        ours = seen["status"]["id"][:8]
        assert (
            capsys.readouterr().err == f"mlaunch: no running launch has an ID that starts with 'zz'; running: {ours}\n"
        )
    assert main(["stacks"]) == 1
    assert capsys.readouterr().err.startswith("mlaunch: no launch of this user is running here (looked in")


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
            assert main(["why", seen["status"]["id"][:4]]) == 0
            told = capsys.readouterr().out
            if words.search(told):
                break
        assert words.search(told), told
        pid = int(seen["status"]["ranks"][2]["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            assert main(["why"]) == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        told = capsys.readouterr().out
        assert "rank 2 does not answer (ranks 0-1 wait for it, in barrier at " in told
        assert "rank 2 was running the function (it was stopped by a signal)" in told
    assert main(["why"]) == 1


def work_in_a_thread() -> None:
    def deep(left: int) -> int:
        return deep(left - 1) + 1 if left else 0

    def work() -> None:
        while True:
            deep(200)

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.slow
def test_stacks_of_ranks_whose_threads_work(tmp_path: Path) -> None:
    """Their frames are not read, since they go while they are."""
    with running(tmp_path, work_in_a_thread):
        for _ in range(100):
            [told] = ps_and_stacks.ask(b"stacks")
            assert {rank["state"] for rank in told["ranks"]} == {"running the function"}


@pytest.mark.slow
def test_the_state_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as seen:
        held = seen["status"]["ranks"][0]["pid"]
        os.kill(held, signal.SIGSTOP)
        while "(it was stopped by a signal)" not in ps_and_stacks.ask(b"status")[0]["ranks"][0]["state"]:
            os.sched_yield()
        assert main(["stacks"]) == 0
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
    code = "import sys\nfrom mlaunch.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("False\n")


def test_files_of_a_killed_launch_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    registry.listen(os.environ, "dead").close()
    assert os.listdir(tmp_path / "mlaunch") == ["dead.sock"]
    assert ps_and_stacks.ask(b"status") == []
    assert os.listdir(tmp_path / "mlaunch") == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unfinished:  # it was killed at this moment
        unfinished.bind(str(tmp_path / "mlaunch" / "dead.new"))
    registry.remove(os.environ, "dead")
    assert os.listdir(tmp_path / "mlaunch") == []


def test_files_of_no_dead_launch_are_neither_replaced_nor_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not a launch that runs, of the same name; no file of another kind; nothing in another directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "users.sock").write_text("the user's")
    with registry.listen(os.environ, "alive"):
        for name in ("alive", "file", "../users", "/tmp/users"):
            (tmp_path / "mlaunch" / "file.sock").write_text("the user's")
            with pytest.raises(OSError, match=r"File exists|no launch has such an id"):
                registry.listen(os.environ, name)
            assert sorted(os.listdir(tmp_path / "mlaunch")) == ["alive.sock", "file.sock"]
            registry.remove(os.environ, name)
            assert registry.connect(os.environ, "../users") is None
        assert sorted(os.listdir(tmp_path / "mlaunch")) == ["alive.sock", "file.sock"]
        other = registry.connect(os.environ, "alive")
        assert other is not None
        other.close()
    assert (tmp_path / "users.sock").read_text() == (tmp_path / "mlaunch" / "file.sock").read_text() == "the user's"


def test_a_launch_that_does_not_listen_yet_is_not_taken_for_a_dead_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    class Looking(socket.socket):
        def listen(self, *args: int) -> None:
            assert ps_and_stacks.ask(b"status") == []  # another process asks at this moment
            super().listen(*args)

    monkeypatch.setattr(registry.socket, "socket", Looking)
    with registry.listen(os.environ, "new"):
        assert os.listdir(tmp_path / "mlaunch") == ["new.sock"]
        os.utime(tmp_path / "mlaunch" / "new.sock", (0, 0))
        (tmp_path / "mlaunch" / "new.sock").rename(tmp_path / "mlaunch" / "killed.new")
        assert ps_and_stacks.ask(b"status") == []
        assert os.listdir(tmp_path / "mlaunch") == []


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
    assert main(["ps"]) == 1
    assert capsys.readouterr().err == (
        f"mlaunch: {tmp_path}/mlaunch must belong to this user with mode 0700, but it belongs to uid {os.getuid()} "
        f"with mode 0755; set XDG_RUNTIME_DIR to a directory of yours, or remove it\n"
    )


def test_a_strangers_directory_elsewhere_hides_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Anybody can make one of the usual places, before this user does."""
    strange = tmp_path / "strange"
    strange.mkdir(mode=0o777)
    strange.chmod(0o777)
    own = registry.candidates(os.environ)
    monkeypatch.setattr(registry, "candidates", lambda _environ: [own[0], strange, *own[1:]])
    with running(tmp_path) as seen:
        assert [status["id"] for status in ps_and_stacks.ask(b"status")] == [seen["status"]["id"]]


def wait_for_ever() -> None:
    while True:
        signal.pause()


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Ends the launch that the block makes, once it runs."""

    def stop() -> int:
        while not ps_and_stacks.ask(STATUS):
            os.sched_yield()
        return main(["stop"])

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
    assert main(["ps"]) == 0


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
    assert main(["stop"]) == 1
    assert capsys.readouterr().err.startswith("mlaunch: no launch of this user is running here")
    with running(tmp_path) as seen, Ranks(n_gpus=1) as ranks:
        ranks.run(int)
        while len(ps_and_stacks.ask(STATUS)) < 2:
            os.sched_yield()
        for words, told in (
            (["stop", "zz"], "mlaunch: no running launch has an ID that starts with 'zz'; running:\n"),
            (["stop"], " launches run; say which, such as mlaunch stop "),
        ):
            assert main(words) == 1
            error = capsys.readouterr().err
            assert told in error
            assert seen["status"]["id"][:8] in error


def test_the_parts_of_one_launch_on_a_machine_are_stopped_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[bytes, str]] = []

    def ask(word: bytes, start: str = "", **_: object) -> list[dict[str, Any]]:
        asked.append((word, start))
        part = {"id": "6d064c40f1", "function": "f()", "world_size": 2, "restart_count": 0, "age": 2.0, "caller": 7}
        return [{**part, "ranks": [{"rank": rank}]} for rank in range(2)]

    monkeypatch.setattr(ps_and_stacks, "ask", ask)
    assert main(["stop", "--now", "6d06"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in told] == [["ending", "6d064c40"]] * 2 + [["ended"]]
    assert asked == [(STATUS, "6d06"), (END, "6d064c40f1")]  # which goes to both


def test_launches_are_listed_beside_leases_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leases").mkdir(mode=0o755)
    (tmp_path / "leases").chmod(0o755)
    monkeypatch.setenv("MLAUNCH_LEASE_DIR", str(tmp_path / "leases"))
    assert main(["ps"]) == 1
    said = capsys.readouterr()
    assert "no launch of this user is running here" in said.out
    assert said.err.endswith(f"with mode 0755: chmod 700 {tmp_path / 'leases'}\n")


def test_silent_visitors_make_way() -> None:
    """Nor do they take the descriptors of those who speak: the oldest leave."""
    environ = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    reception = Reception(environ, "crowded")
    reception.open()
    silent = []
    for _ in range(100):
        silent.append(registry.connect(environ, "crowded"))
        assert reception.take(reception.fds()[:1]) == []
    assert len(reception.fds()) < 40
    silent[-1].send(STATUS)
    ((visitor, word),) = reception.take(linux.wait_readable(reception.fds(), LIMIT))
    assert word == STATUS
    answer(visitor, {})
    for one in silent:
        one.close()
    reception.close()


def test_no_descriptor_for_a_visitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener would stay readable, and the agent would spin."""
    environ = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    reception = Reception(environ, "poor")
    reception.open()
    with registry.connect(environ, "poor"):
        listener = reception.fds()
        refusing = SimpleNamespace(
            accept=raise_emfile, fileno=reception._listener.fileno, close=reception._listener.close
        )
        monkeypatch.setattr(reception, "_listener", refusing)
        assert reception.take(listener) == []
        assert reception.fds() == []
    assert registry.connect(environ, "poor") is None


def raise_emfile() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.slow
def test_visitors_that_misbehave(tmp_path: Path) -> None:
    """Silent ones, those that leave at once, those that speak nonsense, those that do not listen."""
    with running(tmp_path) as seen:
        path = str(registry.home(os.environ) / f"{seen['status']['id']}.sock")
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
        for visitor, word in zip(silent, [b"", b"x" * 5000, b"stacks", b"status"] * 10, strict=True):
            visitor.connect(path)
            if word:
                visitor.send(word)
        for visitor in silent[::2]:
            visitor.close()
        assert ps_and_stacks.ask(b"status")[0]["id"] == seen["status"]["id"]
        for visitor in silent[1::2]:
            visitor.close()


@pytest.mark.slow
def test_a_launch_whose_visitors_queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is slow to take them in is waited for; one that is stopped is left out."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registry.listen(environ, "slow") as agent:
        silent = list(iter(lambda: registry.connect(environ, "slow"), None))
        monkeypatch.setattr(running_launches, "_QUEUE_TIMEOUT", 1)
        assert ps_and_stacks.ask(STATUS) == []
        monkeypatch.setattr(running_launches, "_QUEUE_TIMEOUT", int(LIMIT))
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(ps_and_stacks.ask, STATUS)
            for _ in silent:
                agent.accept()[0].close()
            linux.wait_readable([agent.fileno()], LIMIT)
            one, _ = agent.accept()
            assert one.recv(64) == STATUS
            answer(one, {"id": "slow"})
            assert asked.result(LIMIT) == [{"id": "slow"}]
    for visitor in silent:
        visitor.close()


@pytest.mark.timeout(60)  # it would wait for ever
def test_a_launch_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose agent somebody has stopped: the kernel takes connections for it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(running_launches, "_ANSWER_TIMEOUT", 0.01)
    with registry.listen(os.environ, "deaf"):
        assert ps_and_stacks.ask(b"status") == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (64, "1 min 4 s"), (7500, "2 h 5 min"), (90_000, "1 d 1 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert in_two_units(seconds) == words
