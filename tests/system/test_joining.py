"""A process that something else started becomes a rank: torchrun, mpirun, srun's environment, or by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mlaunch
from tests import builds, launches
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.system import slurm
from tests.users import users_environ

JOINER = str(ROOT / "tests" / "system" / "joiner.py")
TORCHRUN = [IMPORTED, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]  # fmt: skip
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "oob_tcp_if_include", "lo",
          "--mca", "btl", "self,vader", "-np", "2", sys.executable]  # fmt: skip


def run(command: Iterable[str], **environ: str) -> list[dict[str, Any]]:
    if "torch.distributed.run" in command and builds.lacks_libuv():
        pytest.skip("torchrun needs libuv, and this torch has none")
    done = subprocess.run(
        [*command],
        env={**users_environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [{**one, "stderr": done.stderr} for one in sorted(said, key=lambda one: int(one["rank"]))]


def check(ranks: list[dict[str, Any]]) -> None:
    assert [rank["rank"] for rank in ranks] == [rank["local_rank"] for rank in ranks] == [0, 1]
    assert all(rank["size"] == rank["local_size"] == rank["total"] == 2 for rank in ranks)
    assert ranks[0]["everyone"] == ranks[1]["everyone"]
    assert ranks[0]["everyone"][0] != ranks[0]["everyone"][1]


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (mpirun) is not installed")
LAUNCHERS = [pytest.param(TORCHRUN, id="torchrun"), pytest.param(MPIRUN, id="mpirun", marks=needs_mpirun)]


@pytest.mark.dear("torchrun starts fresh interpreters")
@pytest.mark.nightly("mpirun")
@pytest.mark.parametrize("command", LAUNCHERS)
def test_join_from_env(command: list[str]) -> None:
    ranks = run([*command, JOINER, "same"])
    check(ranks)
    assert ranks[0]["random"] == ranks[1]["random"]
    said = [line for line in ranks[0]["stderr"].splitlines() if line.startswith("mlaunch: ")]
    assert len(said) == 1
    assert said[0].startswith("mlaunch: joined 2 ranks (gloo) at ")
    assert said[0].endswith(f"started by {'mpirun' if 'mpirun' in command else 'torchrun'}")


@pytest.mark.nightly
@pytest.mark.parametrize("command", LAUNCHERS)
def test_the_decorator_joins(command: list[str]) -> None:
    ranks = run([*command, JOINER, "decorator"])
    check(ranks)
    assert [(rank["scale"], rank["values"]) for rank in ranks] == [(2, 1)] * 2


def tasks(how: str, environs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What a joiner in each of these environments says."""
    processes = [
        subprocess.Popen(
            [IMPORTED, JOINER, how],
            env={**users_environ(), "PYTHONPATH": str(ROOT), **environ},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environ in environs
    ]
    return [json.loads(process.communicate(timeout=120)[0]) for process in processes]


def pair(code: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes that run the code, whose first argument is the rank."""
    return [
        subprocess.Popen(
            [IMPORTED, "-c", code, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip


def test_processes_with_the_environment_of_srun() -> None:
    """Two by hand, since the real one needs a cluster; with it, see the variables in Slurm's manual of srun."""
    check(run_as_srun("same"))


def run_as_srun(how: str) -> list[dict[str, Any]]:
    with mlaunch.Server() as server:
        port = str(server.py_server_port)
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_SRUN_COMM_PORT": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "MASTER_PORT": port,
    }  # fmt: skip
    return tasks(how, [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)])


def test_seeds_per_rank() -> None:
    first, second = run_as_srun("per-rank")
    assert first["random"] != second["random"]
    assert run_as_srun("per-rank")[1]["random"] == second["random"]


def test_tasks_with_the_environment_of_submitits_local_executor() -> None:
    with mlaunch.Server() as server:
        port = str(server.py_server_port)
    submitit = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_ID": "7",
                "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "MASTER_PORT": port}  # fmt: skip
    numbers = [{"SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)} for rank in range(2)]
    ranks = tasks("decorator", [{**submitit, **number} for number in numbers])
    check(ranks)
    assert [rank["device"] for rank in ranks] == ["cpu", "cpu"]
    assert [rank["rank0"] for rank in ranks] == [[0], [None]]


JOIN = """
import sys, torch, mlaunch
from mlaunch import comm
rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
mlaunch.join(rank, 2, host, port, local_rank=0, seed=3)
try:
    mlaunch.join(rank, 2, host, port)
except RuntimeError as error:
    print(error)
print(comm.all_gather(comm.get_rank()), mlaunch.get_backend(), torch.rand(1).item(), mlaunch.get_local_device_id())
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_join(host: str) -> None:
    with mlaunch.Server() as server:
        port = str(server.py_server_port)
    (first, first_err), (second, _) = (process.communicate(timeout=120) for process in pair(JOIN, host, port))
    assert first.splitlines()[0] == "this process is rank 0 of a process group already; it can join only one"
    assert first.splitlines()[1].startswith("[0, 1] gloo 0.")
    assert first.splitlines()[1] == second.splitlines()[1]
    assert f"mlaunch: joined 2 ranks (gloo) at {'[::1]' if ':' in host else host}:{port}" in first_err


SERVED = """
import sys, mlaunch
from mlaunch import comm
rank, port = int(sys.argv[1]), int(sys.argv[2])
mlaunch.init_process_group("localhost", port, 2, rank, 0)
client = mlaunch.Client("localhost", port, timeout=60)
client.group_barrier("all", 2)
print(comm.all_gather(rank), client.bcast_val("sent" if rank else None, "key", 2))
"""


def test_the_idiom_of_megengine() -> None:
    """A server of one's own, at whose port processes of one's own form a group; and another, when that is over."""
    with mlaunch.Server() as server:
        for _ in range(2):
            processes = pair(SERVED, str(server.py_server_port))
            assert [process.communicate(timeout=120)[0] for process in processes] == ["[0, 1] sent\n"] * 2


BEREFT = """
import os, select, signal, sys, mlaunch, torch.distributed as dist
from mlaunch import comm

def shutdown(group):  # as of NCCL, which misses the peer
    print("ended the group")
    raise dist.DistBackendError("remote process exited or there was a network error")

rank, port, victim = map(int, sys.argv[1:])
mlaunch.join(rank, 2, "127.0.0.1", port, verbose=False)
dist.ProcessGroup.shutdown = shutdown
peer = comm.all_gather(os.getpid())[victim]
if rank == victim:
    signal.pause()
pidfd = os.pidfd_open(peer)
os.kill(peer, signal.SIGKILL)
select.select([pidfd], [], [])
print("over")
"""


@builds.silent
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "shutdown"), reason="this torch shuts down groups of NCCL alone")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_is_dead_at_exit(victim: int) -> None:
    """Also the one with the store. The others end as they would have ended."""
    with mlaunch.Server() as server:
        port = str(server.py_server_port)
    processes = pair(BEREFT, port, str(victim))
    ends = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert ends[1 - victim] == ("over\nended the group\n", "", 0)
    assert ends[victim] == ("", "", -signal.SIGKILL)


# What is recognised

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "9", "LOCAL_RANK": "1"}
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_SRUN_COMM_PORT": "5", "MASTER_ADDR": "h",
         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}  # fmt: skip


RECOGNISE = """
import dataclasses, json, os
from tests import launches
print(json.dumps(dataclasses.asdict(launches.recognised())), flush=True)
"""


@needs_mpirun
def test_mpirun_in_an_allocation_of_slurm_is_not_taken_for_srun(tmp_path: Path) -> None:
    """Its daemons are tasks of srun's, one on each node, whose variables the ranks inherit."""
    if why := slurm.why_not():
        pytest.skip(why)
    with slurm.running(tmp_path) as environ:
        allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
        mpirun = [*MPIRUN[: MPIRUN.index("-np")], "--mca", "plm", "slurm"]
        places = run([*allocation, *mpirun, sys.executable, "-c", RECOGNISE], **environ, MASTER_ADDR="h")
    found = [(place["launcher"], place["rank"], place["world_size"], place["local_rank"]) for place in places]
    assert found == [("mpirun", rank, 4, rank % 2) for rank in range(4)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2, "h", 1), "rank=2 with world_size=2: allowed: 0 to 1"),
        ((-1, 2, "h", 1), "rank=-1: allowed: whole numbers from 0"),
        ((0, 2, "h", 0), "port=0: allowed: whole numbers from 1"),
        ((0, 1, "h", 1, "nonsense"), "backend='nonsense': torch .* offers"),
        ((0, 1, "h", 1, None, None, "random"), "seed='random': allowed: a whole number from 0 to 4294967295, 'per-ra"),
        ((0, 1, "h", 1, None, None, -1), "seed=-1: allowed: a whole number"),
    ],
)
def test_join_refuses(arguments: tuple[Any, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches.once_it_joins(monkeypatch, lambda: pytest.fail("it joins"))
    with pytest.raises(ValueError, match=words):
        mlaunch.join(*arguments)


def test_a_contradiction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"world_size=2, but torchrun started this process as rank 1 of 4, and .*join"):
        mlaunch.launcher(lambda: 1, n_gpus=2, world_size=2)()
    assert mlaunch.launcher(lambda: 1, n_gpus=2, world_size=2, join=False)() == [1, 1]
    monkeypatch.setenv("MLAUNCH_JOIN", "0")
    assert mlaunch.launcher(lambda: 1, n_gpus=2)() == [1, 1]


def test_variables_for_a_group_of_one_are_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCH, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert mlaunch.launcher(lambda: 1, n_gpus=2)() == [1, 1]


@pytest.mark.parametrize("tasks", ["1", "3"])
def test_one_task_of_srun_per_machine_starts_that_machines_ranks(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert mlaunch.launcher(lambda: 1, n_gpus=2, world_size=2)() == [1, 1]


@pytest.mark.slow
def test_seeds_of_a_launch() -> None:
    def train() -> list[float]:
        import random

        import numpy
        import torch

        return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]

    first, second = mlaunch.launcher(train, 2, seed=5)()
    assert first == second
    assert mlaunch.launcher(train, 2, seed=5)() == [first, first]
    third, fourth = mlaunch.launcher(train, 2, seed="per-rank:5")()
    assert third == first
    assert fourth != first
    assert mlaunch.launcher(train, 2, seed="per-rank")() == mlaunch.launcher(train, 2, seed="per-rank:1024")()


def test_the_rank_zero_filter() -> None:
    def train() -> list[str]:
        import logging

        seen: list[str] = []
        for per_machine in (False, True):
            handler = logging.Handler()
            handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
            handler.addFilter(mlaunch.RankZeroFilter(per_machine=per_machine))
            logger = logging.getLogger(f"test {per_machine}")
            logger.addHandler(handler)
            os.environ["LOCAL_RANK"] = "0"
            logger.warning("careful %s", per_machine)
            logger.error("bad %s", per_machine)
        return seen

    assert mlaunch.launcher(train, 2)() == [
        ["careful False", "bad False", "careful True", "bad True"],
        ["bad False", "careful True", "bad True"],
    ]
