"""What ranks do is seen while they do it: ``mlaunch ps --watch``, and ``train.watch()``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mlaunch
from mlaunch import Ranks, launcher
from tests import launches
from tests.contract.test_engine_calls import Threads
from tests.imported import IMPORTED
from tests.processes import wait_until
from tests.system.commands import environment, write

HERE = "test_watching.py"
LIMIT = 60.0  # seconds
TERMINAL = {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}  # whatever xdist says of a width


@pytest.fixture(autouse=True)
def no_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches.hide_other_launches(monkeypatch)


def train(go: Path) -> None:
    for turn in mlaunch.progress(range(3), "epoch 1"):
        if dist.get_rank() == turn == 1:
            go.read_text()
        dist.barrier()


@contextlib.contextmanager
def training(tmp_path: Path, call: Callable[[Path], Any]) -> Iterator[None]:
    """Rank 1 makes one turn and reads then; the others wait for it."""
    os.mkfifo(tmp_path / "go")
    thread = threading.Thread(target=lambda: call(tmp_path / "go"))
    thread.start()
    try:
        yield
    finally:
        (tmp_path / "go").write_text("x")
        thread.join()


def lines() -> list[str]:
    return launches.watched_rows()


def row(number: int, device: str = "cpu") -> str:
    where = "read_text" if number == 1 else "barrier"
    return (
        rf" +{number}  {device} +running the function +in {where} at {HERE}:\d+ +epoch 1: 1/3 +\S+( s each)? +"
        rf"[\d.]+ [MG]iB"
    )


def wait_for(rows: list[str]) -> None:
    def is_there() -> bool:
        found = lines()
        return all(any(re.fullmatch(wanted, line) for line in found) for wanted in rows)

    try:
        wait_until(is_there)
    except AssertionError:
        pytest.fail("\n".join(lines()))


@pytest.mark.slow
def test_a_row_for_each_rank(tmp_path: Path) -> None:
    with training(tmp_path, launcher(train, 3)):
        wait_for([row(0), row(1), row(2)])
        [launch] = launches.ask("watch")
        assert all(rank["cpu"] > 0 for rank in launch["ranks"])
        assert "stacks" not in launch["ranks"][0]


def test_ranks_that_stay(tmp_path: Path) -> None:
    with Ranks(n_gpus=2) as ranks:
        with training(tmp_path, lambda go: ranks.run(train, go)):
            wait_for([row(0), row(1)])
        wait_until(lambda: all("waiting for a call" in line for line in lines()[2:]))


@pytest.mark.slow
def test_ranks_of_an_engine(tmp_path: Path) -> None:
    with training(tmp_path, launcher(train, 2, engine=Threads())):
        wait_for([row(0, "cpu on m0"), row(1, "cpu on m0"), row(2, "cpu on m1")])


def read_until(fd: int, pattern: str) -> str:
    """What has been drawn, at the latest when the pattern is there."""
    found, end = "", time.monotonic() + LIMIT
    while not re.search(pattern, found):
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        assert ready, found
        assert time.monotonic() < end, found
        data = os.read(fd, 65536)
        assert data, found
        found += data.decode(errors="replace")
    return found


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_the_command(tmp_path: Path, terminal: tuple[int, int]) -> None:
    """It shows what comes, until it is interrupted."""
    reader, writer = terminal
    command = [IMPORTED, "-m", "mlaunch", "ps", "--watch", "0.1", "--caller", str(os.getpid())]
    watcher = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, env=environment(**TERMINAL))
    read_until(reader, f"process {os.getpid()} has no launch running here")
    with training(tmp_path, launcher(train, 2)):
        read_until(reader, rf"  1  cpu +running the function +in read_text at {HERE}:\d+ +epoch 1: 1/3")
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(LIMIT) == 0


SCRIPT = """
import pathlib
from mlaunch import launcher
def train():
    print("printed meanwhile", flush=True)
    pathlib.Path("go").read_text()
if __name__ == "__main__":
    ours = launcher(train, 2)
    ours.watch()
    run = ours.submit()
    ours.watch()
    run.result()
"""


def test_a_submitted_call_on_a_terminal(tmp_path: Path, terminal: tuple[int, int]) -> None:
    reader, writer = terminal
    os.mkfifo(tmp_path / "go")
    command = [IMPORTED, write(tmp_path, SCRIPT)]
    streams = {"stdin": writer, "stdout": writer, "stderr": writer}
    script = subprocess.Popen(command, cwd=tmp_path, env=environment(**TERMINAL), **streams)
    read_until(reader, r"mlaunch: no call of train\(\) runs in this process")
    read_until(reader, r"  1  cpu +running the function +in read_text at train\.py:6")
    (tmp_path / "go").write_text("x")
    read_until(reader, r"train\(\) has ended")
    assert script.wait(LIMIT) == 0
