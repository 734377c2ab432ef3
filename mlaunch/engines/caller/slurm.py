"""Machines that Slurm allocates, through its commands: ``sbatch``, ``srun``, ``squeue``, ``scancel``."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence

from mlaunch.base.exceptions import LaunchError
from mlaunch.engines.caller.engine import Engine
from mlaunch.engines.caller.engine_arguments import OPTIONAL_NAME
from mlaunch.engines.caller.hosts import check_name
from mlaunch.engines.caller.placement import Ends, Placement
from mlaunch.engines.caller.processes import Processes
from mlaunch.engines.caller.slurm_allocation import Allocation, Existing

_SSH = ("ssh", "-T", "-o", "BatchMode=yes")
# Variables of an outer job steer what an inner srun does: one that binds tasks to cores makes ranks slow. What a user
# sets for Slurm's commands is of use to ours: where jobs go, who pays, how the controller is reached.
_OUTER = ("SLURM_", "SRUN_", "PMIX_", "PMI_")
_USERS = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET", "SLURM_DEBUG"}
_HARMFUL = {"SBATCH_WAIT", "SBATCH_ARRAY_INX"}  # sbatch would answer too late, or ask for many jobs
_COMMAND_TIMEOUT = 20.0  # seconds for a command that asks
_LOOK_DELAY = 1.0  # seconds between questions to the controller


class Slurm(Engine):
    """Asks for an allocation, with the options of ``sbatch`` as keywords; inside a job it uses that job's.

    Args:
        host: A login node, reached by ``ssh``, where Slurm's commands are; None: here.
        python: The interpreter on the nodes; None: the path of this one. mlaunch must be installed for it, in this
            version.
        **options: ``partition="gpu"`` is ``--partition=gpu``, ``gpus_per_node=8`` is ``--gpus-per-node=8``, True is a
            flag alone. The number of nodes is that of ``machines``; one without it.
    """

    def __init__(self, *, host: str | None = None, python: str | None = None, **options: str | int | bool) -> None:
        super().__init__(python)
        for name in ("nodes", "ntasks", "job_name", "wrap", "array", "wait"):
            if name in options:
                raise TypeError(f"Slurm: {name}= is the launcher's to say; machines= is the number of nodes")
        for name, value in options.items():
            if not isinstance(value, str | int):
                raise TypeError(f"Slurm: {name}={value!r}: allowed: a string, a whole number, True, False")
        OPTIONAL_NAME.check("host", host)
        if host is not None:
            check_name(host)
        self._shell = Shell(host)
        self._options = [_flag(name, value) for name, value in options.items() if value is not False]
        self._per_task = [flag for flag in self._options if flag.startswith("--cpus-per-task")]

    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and not self._options and self._shell.host is None:
            return _OnNodes(self._shell, Existing(self._shell, job, machines), command, self._per_task)
        count = machines or 1
        flags = [f"--nodes={count}", "--ntasks-per-node=1", *self._options]
        # A batch job, not salloc: with that no process is in the job before a member is, so one that begins while its
        # caller sleeps would stay until its time is over.
        return _OnNodes(self._shell, Allocation(self._shell, flags, count, self.lease), command, self._per_task)

    def __repr__(self) -> str:
        return f"Slurm({' '.join(self._options)})"


def _flag(name: str, value: str | int | bool) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


class Shell:
    """Where Slurm's commands run: here, or on a login node."""

    def __init__(self, host: str | None) -> None:
        self.host = host

    def environ(self) -> Mapping[str, str]:
        """Returns this process's environment without an outer job's variables. What is meant for salloc holds, too."""
        kept = {name: value for name, value in os.environ.items() if name in _USERS or not name.startswith(_OUTER)}
        for name in [name for name in kept if name.startswith("SALLOC_")]:
            kept.setdefault(f"SBATCH_{name.removeprefix('SALLOC_')}", kept[name])
        return {name: value for name, value in kept.items() if name not in _HARMFUL}

    def command(self, args: Sequence[str]) -> list[str]:
        """Returns what runs this command there."""
        return list(args) if self.host is None else [*_SSH, self.host, shlex.join(args)]

    def ask(self, *args: str) -> str:
        """Returns what a command prints; "" if it fails or does not answer."""
        return self.answer(*args) or ""

    def answer(self, *args: str) -> str | None:
        """Returns what a command prints; None if it fails or does not answer."""
        try:
            done = subprocess.run(
                self.command(args),
                check=False,
                capture_output=True,
                encoding="utf-8",
                env=self.environ(),
                # ssh reads what it finds there, which is the caller's.
                stdin=subprocess.DEVNULL,
                timeout=_COMMAND_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None


class _OnNodes(Placement):
    def __init__(
        self, shell: Shell, allocation: Allocation | Existing, command: Sequence[str], per_task: Sequence[str]
    ) -> None:
        self._shell = shell
        self._allocation = allocation
        self._command = command
        self._per_task = per_task
        self._processes = Processes()
        self._asked, self._state = 0.0, "asks Slurm for an allocation"
        self.sizes: Sequence[int | None] = [None] * allocation.count
        self.farewell = allocation.farewell

    def state(self) -> str:
        if time.monotonic() - self._asked > _LOOK_DELAY:
            self._state = self._allocation.state()
            self._asked = time.monotonic()
            self.queues = bool(self._allocation.job)  # before, sbatch has not answered
        return self._state

    def start(self, machine: int) -> Ends:
        node = self._allocation.nodes[machine]
        # --overlap: a step would else wait until the steps of others have left their resources.
        step = ["srun", f"--jobid={self._allocation.job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        # Slurm would bind the member, and so all ranks of the node, to the cores of one task.
        step += ["--cpu-bind=none", "--kill-on-bad-exit=1", "--job-name=mlaunch", *self._per_task]
        try:
            command = self._shell.command([*step, *self._command])
            return self._processes.start(machine, command, self._shell.environ())
        except OSError as error:
            raise LaunchError(f"srun cannot be run here: {error.strerror}") from error

    def preempted(self) -> bool:
        return self._allocation.preempted()

    def fate(self, machine: int) -> str:
        """Says what Slurm knows: of the job, of the node, of srun."""
        node = self._allocation.nodes[machine]
        ended = self._processes.fate(machine, f"srun on {node}")
        return self._allocation.fate(node) or ended

    def cancel(self) -> None:
        self._allocation.release()  # first, since the rest may be interrupted; the job ends after its members
        self._processes.end()
        self._allocation.wait()
