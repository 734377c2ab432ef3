"""Decorated functions whose ranks stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mlaunch import Ranks, launcher
from mlaunch.caller.kept import shared
from tests.processes import alive, wait_gone


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for found in shared._sets.values():
        found.ranks.close()
    shared._sets.clear()


def pids() -> int:
    return os.getpid()


train = launcher(pids, n_gpus=2, keep=600)


def test_equal_options_share_ranks() -> None:
    other = launcher(lambda x: (x, os.getpid()), n_gpus=2, keep=600)
    first = train()
    assert train() == first
    assert other(3) == [(3, pid) for pid in first]
    assert train.options(deadline=60)() == first  # which is of a call
    assert train.options(n_gpus=1)()[0] not in first
    assert train() == first
    assert len(train.history) >= 3


def test_a_changed_environment_replaces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()
    monkeypatch.setenv("KEPT_TEST", "7")
    assert launcher(lambda: os.environ["KEPT_TEST"], n_gpus=2, keep=600)() == ["7", "7"]
    assert not set(train()) & set(first)
    assert not any(map(alive, first))


def test_a_changed_directory_replaces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()
    monkeypatch.chdir(tmp_path)
    assert launcher(os.getcwd, n_gpus=2, keep=600)() == [str(tmp_path)] * 2
    assert not set(train()) & set(first)
    assert not any(map(alive, first))


def test_a_seed_counts_for_each_call() -> None:
    draw = launcher(lambda: torch.rand(1).item(), n_gpus=2, keep=600, seed=5)
    assert draw() == draw()
    assert draw.options(seed=6)() != draw()


def test_restarts_get_fresh_ranks(tmp_path: Path) -> None:
    def work(path: str) -> int:
        if dist.get_rank() == 1 and not os.path.exists(path):
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return os.getpid()

    first = train()
    with pytest.warns(RuntimeWarning, match="is started again"):
        found = launcher(work, n_gpus=2, keep=600, max_restarts=2)(str(tmp_path / "tried"))
    assert not set(found) & set(first)
    assert train() == found


def test_they_end_when_nobody_calls() -> None:
    brief = launcher(pids, n_gpus=2, keep=0.05)
    first = brief()
    wait_gone(first)
    assert not set(brief()) & set(first)


def test_an_exception_leaves_them() -> None:
    first = train()
    with pytest.raises(ZeroDivisionError):
        launcher(lambda: 1 / 0, n_gpus=2, keep=600)()
    assert train() == first


def test_a_fork_of_the_caller_gets_its_own() -> None:
    first = train()
    assert first == train()
    child = os.fork()
    if child == 0:
        os._exit(0 if not shared._sets else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert train() == first


def test_given_ranks_are_used() -> None:
    with Ranks(n_gpus=2) as ranks:
        assert launcher(pids, n_gpus=1).options(ranks=ranks)() == ranks.run(pids)
        assert shared._sets == {}


KEEPING = """
import os
from mlaunch import launcher

@launcher(n_gpus=2, keep=600)
def train():
    return os.getpid()

print(*train())
"""


def test_the_end_of_the_interpreter_leaves_nothing(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(KEEPING)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(alive(int(pid)) for pid in done.stdout.split())
