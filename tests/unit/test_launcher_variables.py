"""Which launcher has started a process, as its environment shows it."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

import mlaunch
from mlaunch.caller.options.launch_options import Options
from mlaunch.rank import launcher_variables
from mlaunch.rendezvous.address import listen
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.system.test_joining import SLURM, TORCH

SILENT = """
import os, sys, mlaunch
from mlaunch.rank import become_rank
become_rank._ANSWER_TIMEOUT = 0.5
try:
    mlaunch.join(0, 2, "127.0.0.1", int(sys.argv[1]))
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)  # torch may try on for a while
"""


def test_a_port_at_which_no_store_listens() -> None:
    with listen() as silent:
        port = silent.getsockname()[1]
        command = [IMPORTED, "-c", SILENT, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.stdout.startswith(
        f"rank 0 cannot host the ranks' store: port {port} is taken, and no mlaunch.Server listens there"
    )


OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "x"}  # fmt: skip


SUBMITIT = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2",
            "SUBMITIT_LOCAL_JOB_ID": "4711"}  # fmt: skip


def test_recognition_of_submitit() -> None:
    place = launcher_variables.recognise(SUBMITIT)
    assert place is not None
    assert place == launcher_variables.RankInfo("submitit", 1, 2, "127.0.0.1", place.port, 1, 2)
    assert place.port != getattr(
        launcher_variables.recognise({**SUBMITIT, "SUBMITIT_LOCAL_JOB_ID": "4712"}), "port", None
    )
    in_slurm = launcher_variables.recognise({**SUBMITIT, "SUBMITIT_EXECUTOR": "slurm", **SLURM})
    assert in_slurm is not None
    assert in_slurm.launcher == "srun"
    assert launcher_variables.recognise({**SUBMITIT, "SUBMITIT_EXECUTOR": "slurm"}) is None


def test_recognition() -> None:
    place = launcher_variables.recognise(TORCH)
    assert place == launcher_variables.RankInfo("torchrun", 1, 4, "h", 9, 1, None)
    place = launcher_variables.recognise({**SLURM, "MASTER_PORT": "9"})
    assert place == launcher_variables.RankInfo("srun", 3, 4, "h", 9, 1, 2)
    place = launcher_variables.recognise(OPENMPI)
    assert place is not None
    assert (place.launcher, place.host, place.rank, place.local_world_size) == ("mpirun", "127.0.0.1", 1, 2)
    assert 15000 <= place.port < 25000
    place = launcher_variables.recognise(
        {**OPENMPI, "MASTER_ADDR": "h7"}
    )  # which counts for more than where mpirun has put us
    assert place is not None
    assert place.host == "h7"
    assert launcher_variables.recognise({**SLURM, **OPENMPI, **TORCH}).launcher == "torchrun"  # type: ignore[union-attr]
    of_run = {**TORCH, "MLAUNCH_RANK_PID": str(os.getpid())}
    assert launcher_variables.recognise(of_run).launcher == "mlaunch run"  # type: ignore[union-attr]
    inside_mpi_init = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}  # of a task of srun's
    assert launcher_variables.recognise({**SLURM, **OPENMPI, **inside_mpi_init}).launcher == "srun"  # type: ignore[union-attr]


def test_environments_that_are_not_recognised() -> None:
    batch_script = {name: SLURM[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")}
    assert launcher_variables.recognise({}) is None
    assert launcher_variables.recognise(batch_script) is None
    assert launcher_variables.recognise({**TORCH, "MLAUNCH_JOIN": "0"}) is None
    assert launcher_variables.recognise({**TORCH, "MLAUNCH_RANK_PID": "1"}) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (mlaunch.join_from_torch, "RANK is not set: was this process started by torchrun? Of RANK, WORLD_SIZE, "
                                  "MASTER_ADDR, MASTER_PORT the environment has MASTER_ADDR"),
        (lambda: mlaunch.join_from_slurm("h", 1), "SLURM_PROCID is not set: was this process started by srun? Of "),
        (lambda: mlaunch.join_from_openmpi("h", 1), "OMPI_COMM_WORLD_RANK is not set: was this process started by"),
        (mlaunch.join_from_env, "this process was not started by torchrun, submitit, srun or mpirun, as far as its "
                                "environment tells (MLAUNCH_JOIN=unset); start it with one of these, or call "
                                "mlaunch.join()"),
        (lambda: launcher_variables.from_torch({**TORCH, "RANK": "one"}),
         "RANK='one' in the environment is not a whole"),
        (lambda: launcher_variables.from_openmpi({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
         "mpirun started this process on one of several machines, and does not say where rank 0 is: set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_missing_variables_are_named(call: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "h")
    with pytest.raises(RuntimeError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(("option", "words"), [
    ({"join": "no"}, "join='no': allowed: True, False"),
    ({"seed": 1.5}, "seed=1.5: allowed: a whole number from 0"),
])  # fmt: skip
def test_options_of_a_wrong_type(option: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Options(**option)
