"""Agents that serve one launch after another: which do, what they leave to the next, and what becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.conftest import ROOT
from tests.contract.functions import total
from tests.contract.preparing import LIMIT, TRIES, agents, until_kept
from tests.processes import alive, status_of, wait_gone, wait_until
from tests.users import users_environ


def agent_and_rank() -> tuple[int, int]:
    return os.getppid(), os.getpid()


def agent_of(n_gpus: int = 1) -> int:
    """Returns the agent that has just served a launch."""
    return launcher(os.getppid, n_gpus)()[0]


def test_calls_in_a_row_share_an_agent_and_no_rank() -> None:
    seen: list[int] = []

    def call() -> int:
        found = launcher(agent_and_rank, 2)()
        seen.extend(rank for _, rank in found)
        return found[0][0]

    until_kept(call)
    assert len(set(seen)) == len(seen)


def test_other_shapes_and_functions_share_it() -> None:
    sizes = iter([1, 2, 3] * TRIES)
    until_kept(lambda: agent_of(next(sizes)))
    assert launcher(total, 2)() == [2, 2]


def test_an_agent_leaves_in_a_pause() -> None:
    agent = agent_of()
    wait_gone([agent], LIMIT)
    assert agent_of() != agent


def fail() -> None:
    raise ValueError("no such luck")


def leave() -> None:
    os._exit(3)


@pytest.mark.parametrize("how", [fail, leave])
def test_after_a_failure_it_serves_no_other(how: Callable[[], None]) -> None:
    """It ends in its own time, since it has to see to what is left."""
    agent = until_kept(agent_of)
    with pytest.raises((LaunchError, ValueError)):
        launcher(how, 1)()
    assert agent_of() != agent
    wait_gone([agent], LIMIT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_somebody_ends_or_stops_is_not_missed(number: signal.Signals) -> None:
    agent = until_kept(agent_of)
    with contextlib.suppress(ProcessLookupError):  # it may have left in the meantime
        os.kill(agent, number)
        # It would be stopped during the next launch.
        wait_until(lambda: not alive(agent) or status_of(agent)[0] == "T")
    assert launcher(total, 2)() == [2, 2]
    wait_gone([agent], LIMIT)


def held_by_agent() -> tuple[int, int]:
    """Waits until the agent can be asked, for which it has opened more than in its first moments."""
    agent = os.getppid()
    wait_until(lambda: any(launch["agent"] == agent for launch in launches.ask("status")))
    return agent, len(os.listdir(f"/proc/{agent}/fd"))


@pytest.mark.slow
def test_an_agent_holds_nothing_of_the_launches_before() -> None:
    held: dict[int, list[int]] = {}  # by agent
    for _ in range(10 * TRIES):
        ((agent, number),) = launcher(held_by_agent, 1)()
        numbers = held.setdefault(agent, [])
        numbers.append(number)
        if len(numbers) == 12:
            break
    assert len(numbers) == 12
    assert numbers[-1] < numbers[0] + 8  # some come and go: visitors, and what watches the rank's threads


def leave_a_daemon(path: str) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            Path(path).write_text(str(os.getpid()))
            signal.pause()
        os._exit(0)
    os.waitpid(pid, 0)
    wait_until(lambda: Path(path).exists() and Path(path).read_text() != "")
    return os.getppid()


def test_an_agent_keeps_no_daemon_of_a_rank(tmp_path: Path) -> None:
    paths = (str(tmp_path / str(i)) for i in range(TRIES))

    def call() -> int:
        path = next(paths)
        (agent,) = launcher(leave_a_daemon, 1)(path)
        wait_gone([int(Path(path).read_text())], LIMIT)
        return agent

    until_kept(call)


@pytest.mark.nightly
def test_output_of_ranks_goes_to_the_streams_of_the_moment(tmp_path: Path) -> None:
    """The agent has the streams of its latest launch."""
    files = [tmp_path / name for name in ("first", "second")]
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "from mlaunch import launcher\n"
        "def train(text):\n"
        "    os.write(1, text.encode())\n"
        "    return os.getppid()\n"
        "agents = []\n"
        "for path in sys.argv[1:] * 30:\n"
        "    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "    os.dup2(fd, 1)\n"
        "    os.close(fd)\n"
        "    agents += launcher(train, 1, output='raw')(os.path.basename(path) + '\\n')\n"
        "sys.exit(not any(one == other for one, other in zip(agents, agents[1:])))\n"
    )
    subprocess.run(
        [sys.executable, str(script), *map(str, files)], check=True, env={**users_environ(), "PYTHONPATH": str(ROOT)}
    )
    assert [file.read_text() for file in files] == [f"{file.name}\n" * 30 for file in files]


@pytest.mark.slow
def test_launches_of_many_threads() -> None:
    """Of the agents that are free at the same time one stays."""
    found: list[list[int]] = []

    def call() -> None:
        for _ in range(5):
            found.append(launcher(total, 2)())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert found == [[2, 2]] * 20
    wait_gone(agents(), LIMIT)


@pytest.mark.parametrize("how", ["retired", "killed"])
@pytest.mark.parametrize("prepare", ["0", "1"])
def test_an_agent_ends_with_its_fork_server(how: str, prepare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is retired while an agent rests prepares nothing: that would keep it."""
    monkeypatch.setenv("MLAUNCH_PREPARE", prepare)
    for _ in range(TRIES):
        agent = until_kept(agent_of)
        server = launches.fork_server()
        if how == "killed":
            os.kill(server.pid, signal.SIGKILL)
        else:
            server.retire()
        prepared = launches.prepares_before_it_ends(server)
        launches.drop_prepared()
        wait_gone([server.pid, agent])
        if not prepared:
            break
    else:  # on a busy machine, it may have prepared the next launch before
        raise AssertionError("it has prepared a launch each time")
    launches.drop_prepared()
    monkeypatch.setenv("MLAUNCH_PREPARE", "0")
    assert launcher(total, 2)() == [2, 2]


@pytest.mark.parametrize("calls", [1, 2])
def test_ranks_are_forked_in_the_callers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Also by an agent that has rested; hooks that follow a fork write into it."""
    for number in range(calls):
        directory = tmp_path / str(number)
        directory.mkdir()
        monkeypatch.chdir(directory)
        assert launcher(lambda: os.readlink(f"/proc/{os.getppid()}/cwd"), 1)() == [str(directory)]


def anonymous(pid: int) -> int:
    """Bytes of memory of its own."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon:"))


@pytest.mark.slow
def test_an_agent_does_not_grow_by_being_looked_at() -> None:
    """``mlaunch ps --watch`` looks once a second, for days, and one look left 2 KB there."""

    def look(times: int) -> None:
        for _ in range(times):
            assert any(launch["agent"] == agent for launch in launches.ask("status"))

    with Ranks(n_gpus=1) as ranks:
        agent = ranks.run(os.getppid)[0]
        wait_until(lambda: any(launch["agent"] == agent for launch in launches.ask("status")))
        look(100)
        before = anonymous(agent)
        look(1_000)
        assert anonymous(agent) - before < 1_000 * 500
