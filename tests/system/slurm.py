"""A real Slurm on this machine, in a directory of its own: a controller, and a daemon for each of two nodes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.processes import alive, soon
from tests.system.network import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun")
_TIMEOUT = 60.0
_EVERY = 0.1  # seconds between two commands that look

_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str:
    """Why there can be none here; "" if there can."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"without {', '.join(lacking)}"
    return "" if os.geteuid() == 0 else "daemons of Slurm need root"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Runs it; yields the variables that lead its commands to it."""
    (folder / "state").mkdir()
    ports = {name: free_port() for name in ("port", "first", "second")}
    conf = folder / "slurm.conf"
    conf.write_text(_CONFIG.format(folder=folder, host=os.uname().nodename, **ports))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    try:
        _munge(folder, environ)
        _run(["slurmctld", "-f", str(conf)], environ)
        for node in ("n1", "n2"):
            _run(["slurmd", "-N", node, "-f", str(conf)], environ)
        _wait_for_nodes(environ)
        yield {"SLURM_CONF": str(conf)}
        assert not (jobs := jobs_left(environ)), jobs  # a step whose daemon ends before it stays for good
    finally:
        _end(folder)


def _munge(folder: Path, environ: dict[str, str]) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    names = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munged.pid",
             "log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}  # fmt: skip
    _run(["munged", "--force", *(f"--{name}={path}" for name, path in names.items())], environ)


def _run(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _wait_for_nodes(environ: dict[str, str]) -> None:
    states = ""

    def idle() -> bool:
        nonlocal states
        command = ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        states = done.stdout
        return states.split() == ["idle", "idle"]

    if not soon(idle, _TIMEOUT, _EVERY):
        raise TimeoutError(f"the nodes are not idle: {states}")


def jobs_left(environ: dict[str, str]) -> list[str]:
    """Waits until no job is there, which the controller takes some seconds to complete; returns those that stay."""
    jobs: list[str] = []

    def none() -> bool:
        jobs[:] = _run(["squeue", "-h"], environ).splitlines()
        return not jobs

    soon(none, _TIMEOUT, _EVERY)
    return jobs


def _end(folder: Path) -> None:
    """Ends the daemons, by what they wrote of themselves."""
    files = [folder / f"{name}.pid" for name in ("slurmd.n1", "slurmd.n2", "slurmctld", "munged")]
    pids = [int(file.read_text()) for file in files if file.exists()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        soon(lambda: not any(alive(pid) for pid in pids), 5)
