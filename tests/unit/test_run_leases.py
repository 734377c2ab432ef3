"""``mlaunch run --lease``, and what ``mlaunch ps`` tells of leases."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from mlaunch.leases import command as lease_command
from mlaunch.leases.caller.acquisition import Acquisition, Wish
from mlaunch.leases.caller.lease_directory import place
from mlaunch.run.command.job import Job, job_of
from tests.processes import wait_until
from tests.system.commands import run, start, write
from tests.unit.test_flags import parse

pytest.importorskip("torch", reason="its ranks need torch")

SCRIPT = """
import os
held = [number for number in os.listdir("/proc/self/fd") if "/device." in os.path.realpath(f"/proc/self/fd/{number}")]
print(os.environ["WORLD_SIZE"], os.environ["MLAUNCH_LEASED"], "is held" if held else "is not held", flush=True)
"""


def test_a_command_waits_for_its_turn(tmp_path: Path) -> None:
    cpus = [f"place on the CPUs {number}" for number in range(len(os.sched_getaffinity(0)))]
    before = Acquisition(place(os.environ), Wish(cpus, len(cpus), "before()"))
    lease = before.step()
    assert lease is not None
    command = start(tmp_path, "--lease", "2", write(tmp_path, SCRIPT))
    assert command.stderr is not None
    # Once it says so: it has its place in line before it has looked who is there.
    told = next((line for line in command.stderr if "waits for" in line), "")
    assert re.match(rf"mlaunch: train.py waits for a place on the CPUs, after before\(\) \(pid {os.getpid()}\)", told)
    shown = lease_command.rows(os.environ)
    pid = os.getpid()
    assert re.fullmatch(rf"  place on the CPUs 0  before\(\) of pid {pid}, for \d+ .+", shown[1])
    assert re.fullmatch(rf"  train.py of pid {command.pid}, waits .+ for (1 of )?place on the CPUs 0.*", shown[-1])
    assert command.poll() is None
    lease.close()
    before.close()
    out, _ = command.communicate(timeout=120)
    assert re.fullmatch(r"(2 place on the CPUs \d is held\n){2}", out)  # by the ranks: the command may be killed
    assert lease_command.rows(os.environ) == []


def test_a_command_that_waits_can_be_ended(tmp_path: Path) -> None:
    cpus = [f"place on the CPUs {number}" for number in range(len(os.sched_getaffinity(0)))]
    before = Acquisition(place(os.environ), Wish(cpus, len(cpus)))
    lease = before.step()
    command = start(tmp_path, "--lease", "1", write(tmp_path, SCRIPT))
    wait_until(lambda: len(lease_command.rows(os.environ)) > len(cpus) + 1)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=120)
    assert command.returncode == 128 + signal.SIGTERM
    assert len(lease_command.rows(os.environ)) == len(cpus) + 1
    before.close()
    assert lease is not None
    lease.close()


def checked(*words: str) -> Job:
    args = parse(*words, __file__)
    return lease_command.check(args, job_of(args, {}))


def test_flags_that_do_not_go_together() -> None:
    assert (checked("--lease", "2").size, checked("--lease", "2", "--nproc-per-node", "4").size) == (2, 4)
    for words, text in (
        (["--lease", "0"], "--lease 0: allowed: 1 or more"),
        (["--lease", "2", "--devices", "1"], "--lease 2 with --devices 1: allowed: up to 1"),
        (["--lease", "2", "--nnodes", "2"], "--lease 2 with --nnodes or --engine: leases are of one machine's"),
    ):
        with pytest.raises(ValueError, match=text):
            checked(*words)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path, "--lease", "1", "--devices", "0,1", write(tmp_path, SCRIPT))
    assert done.returncode == 2
    assert "--lease 1: devices=[0, 1]: ranks on CPUs have no device numbers" in done.stderr
