"""What ``ps`` and ``top`` show of the processes of a launch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlaunch import Ranks, launcher
from tests.processes import children


def shown(pid: int | str = "self") -> tuple[str, str]:
    """Returns the command line and the short name of a process."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return line, Path(f"/proc/{pid}/comm").read_text().rstrip("\n")


def train() -> tuple[int, tuple[str, str], tuple[str, str]]:
    return os.getppid(), shown(os.getppid()), shown()


def test_the_processes_of_a_call() -> None:
    (_, agents_name, rank_0), (_, _, rank_1) = launcher(train, 2)()
    assert agents_name == ("mlaunch: agent of train() ", "mlaunch: agent")
    assert rank_0 == ("mlaunch: rank 0 of train() ", "mlaunch: rank 0")
    assert rank_1 == ("mlaunch: rank 1 of train() ", "mlaunch: rank 1")


def test_the_fork_server_names_its_caller() -> None:
    launcher(train, 1)()
    names = [shown(pid)[0].strip() for pid in children(os.getpid())]
    assert f"mlaunch: fork server of {os.getpid()}" in names


def test_ranks_that_stay() -> None:
    with Ranks(n_gpus=2) as ranks:
        assert [name for _, _, (_, name) in ranks.run(train)] == ["mlaunch: rank 0", "mlaunch: rank 1"]


def test_the_function_sees_the_arguments_of_its_caller() -> None:
    import sys

    (values,) = launcher(lambda: (sys.argv, dict(os.environ)), 1)()
    assert values[0] == sys.argv
    assert values[1]["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("name", ["訓練()", "a\0b", "\udc80"])
def test_any_name_of_a_function(name: str) -> None:
    def function() -> str:
        return shown()[0]

    function.__qualname__ = name
    (line,) = launcher(function, 1)()
    assert line.startswith("mlaunch: rank 0 of ")
