"""Files and pipes are read and written with their encoding, not with that of the locale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.system.commands import environment, write

pytestmark = pytest.mark.slow
STRICT = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error::EncodingWarning"}
CALLS = """
import os, signal
from mlaunch import LaunchError, Ranks, comm, launcher

def fail(how):
    comm.create_local_process_group(2)
    if comm.get_rank() == 1:
        if how == "raise":
            raise ValueError("no such luck")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.synchronize()

for how in ("raise", "kill"):
    try:
        launcher(fail, 2, device_type="cpu")(how)
    except ValueError:
        print("raised")
    except LaunchError as error:
        print(str(error).partition("\\n")[0])
with Ranks(n_gpus=2, device_type="cpu") as ranks:
    print(ranks.run(comm.get_rank))
"""
COMMANDS = {
    "doctor": (["doctor"], 0, "two ranks"),
    "ps": (["ps"], 0, ""),
    "run": (["run", "--nproc-per-node=2", "--token-file", "token", "train.py"], 1, "no such luck"),
}


def strictly(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable, *args], environment(**STRICT)
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, encoding="utf-8", timeout=300, check=False
    )


@pytest.mark.nightly
def test_calls(tmp_path: Path) -> None:
    done = strictly(tmp_path, write(tmp_path, CALLS))
    assert (done.returncode, done.stdout) == (0, "raised\nrank 1 of fail() was killed by SIGKILL\n[0, 1]\n"), (
        done.stderr
    )
    assert "EncodingWarning" not in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(tmp_path: Path, name: str) -> None:
    write(tmp_path, "secret of this test", "token")
    write(tmp_path, "raise ValueError('no such luck')")
    args, status, words = COMMANDS[name]
    done = strictly(tmp_path, "-m", "mlaunch", *args)
    assert "EncodingWarning" not in done.stdout + done.stderr
    assert (done.returncode, words in done.stdout + done.stderr) == (status, True), done


@pytest.mark.nightly
def test_benchmarks(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = strictly(ROOT, "-m", "benchmarks", "--rounds", "1", "--json", str(figures), "memory")
    assert "EncodingWarning" not in done.stderr
    assert (done.returncode, figures.exists()) == (0, True), done.stderr


def test_output_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    """Little of it is seen to fail when the buffer is written at last."""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "mlaunch", "warm", "--status"]
        environ = environment(XDG_RUNTIME_DIR=str(tmp_path))
        done = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
