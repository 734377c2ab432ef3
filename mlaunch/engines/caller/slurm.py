"""Machines that Slurm allocates, through its commands: ``sbatch``, ``srun``, ``squeue``, ``scancel``."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.fds import close_in_forks
from mlaunch.engines.caller.engine import OPTIONAL_NAME, Engine
from mlaunch.engines.caller.hosts import check_name
from mlaunch.engines.caller.machines import say
from mlaunch.engines.caller.placement import Ends, Placement, Processes

_SSH = ("ssh", "-T", "-o", "BatchMode=yes")
# Variables of an outer job change what an inner srun does: one that binds tasks to cores makes ranks slow. Variables
# that a user sets for Slurm's commands are kept: where jobs go, who pays, how to reach the controller.
_OUTER = ("SLURM_", "SRUN_", "PMIX_", "PMI_")
_USERS = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET", "SLURM_DEBUG"}
_HARMFUL = {"SBATCH_WAIT", "SBATCH_ARRAY_INX"}  # sbatch would answer too late, or ask for many jobs
_COMMAND_TIMEOUT = 20.0  # seconds for a command that asks Slurm something
_STATE_DELAY = 1.0  # seconds between queries what the job waits for
# Ends the job of this name, after its members: they end with the caller, too, and have ten seconds to clean up. Tries
# again until Slurm says that there is no such job. $0 is the name, which no other job has.
_GIVE_BACK = """
exec 2>/dev/null
job=$(squeue --noheader --name="$0" --format=%i)
turn=0
while [ -n "$job" ] && [ $turn -lt 50 ] && squeue --noheader --steps --jobs="$job" --format=%i | grep -q '[.][0-9]'; do
    sleep 0.2
    turn=$((turn + 1))
done
turn=0
while :; do
    scancel --quiet --name="$0"
    if left=$(squeue --noheader --name="$0" --states=PENDING,CONFIGURING,RUNNING,SUSPENDED --format=%i); then
        [ -n "$left" ] || exit 0
    fi
    turn=$((turn + 1))
    [ $turn -lt 120 ] || exit 1
    [ $turn -lt 10 ] && sleep 1 || sleep 5
done
"""
# Submits the job, prints sbatch's exit status, and gives the job back when its standard input ends: when the caller
# ends, however it does, and also while the job still waits. The job's number is the last line that is a number; a site
# may print more. "127": there is no such program, nor one to give the job back with.
_GUARD = (
    """
exec 3<&0
said=$(sbatch --parsable --job-name="$0" --no-requeue --output=/dev/null "$@" </dev/null)
code=$?
echo "$0 asked $code $(echo "$said" | sed -n 's/;.*//; s/^\\([0-9][0-9]*\\)$/\\1/p' | tail -n 1)"
[ $code = 127 ] && exit 0
cat <&3 >/dev/null
"""
    + _GIVE_BACK
)
# The job's script: it ends when there was no member for so long. The caller may be asleep, or cut off, before it has
# started one. It asks again if the controller does not answer.
_STAY = """
while sleep %d; do
    steps=$(squeue --noheader --steps --jobs=$SLURM_JOB_ID --format=%%i) || continue
    case "$steps" in *.[0-9]*) ;; *) exit 0 ;; esac
done
"""
_LEAST_STAY = 10  # seconds for a caller to see that the job has begun, and to start members
_BAD = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT")
_END_TIMEOUT = 10.0  # seconds for Slurm to take an allocation back
_COMPLETING_TIMEOUT = 5.0  # seconds for Slurm to say why a job has ended
_COMPLETING_DELAY = 0.1  # seconds between queries whether it has ended
_READ = 65536


class Slurm(Engine):
    """A Slurm allocation, with the options of ``sbatch`` as keywords; inside a job, the nodes of that job.

    Args:
        host: A login node, reached by ``ssh``, where Slurm's commands are; None: here.
        python: The interpreter on the nodes; None: the path of this one. mlaunch must be installed for it, in this
            version.
        **options: ``partition="gpu"`` is ``--partition=gpu``, ``gpus_per_node=8`` is ``--gpus-per-node=8``, True is a
            flag without a value. The number of nodes is that of ``machines``; one without it.
    """

    def __init__(self, *, host: str | None = None, python: str | None = None, **options: str | int | bool) -> None:
        super().__init__(python)
        for name in ("nodes", "ntasks", "job_name", "wrap", "array", "wait"):
            if name in options:
                raise TypeError(f"Slurm: {name}= is set by mlaunch itself; give the number of nodes by machines=")
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
        # A batch job, not salloc: a job of salloc's has no process before a member starts, so one that begins while its
        # caller sleeps would stay until its time is over.
        allocation = Allocation(self._shell, flags, count, self.heartbeat_timeout)
        return _OnNodes(self._shell, allocation, command, self._per_task)

    def __repr__(self) -> str:
        return f"Slurm({' '.join(self._options)})"


def _flag(name: str, value: str | int | bool) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


class Shell:
    """The place where Slurm's commands run: here, or on a login node."""

    def __init__(self, host: str | None) -> None:
        self.host = host

    def environ(self) -> Mapping[str, str]:
        """Return this process's environment without an outer job's variables. Those for salloc apply to sbatch, too."""
        kept = {name: value for name, value in os.environ.items() if name in _USERS or not name.startswith(_OUTER)}
        for name in [name for name in kept if name.startswith("SALLOC_")]:
            kept.setdefault(f"SBATCH_{name.removeprefix('SALLOC_')}", kept[name])
        return {name: value for name, value in kept.items() if name not in _HARMFUL}

    def command(self, args: Sequence[str]) -> list[str]:
        """Return the command that runs these arguments there."""
        return list(args) if self.host is None else [*_SSH, self.host, shlex.join(args)]

    def ask(self, *args: str) -> str:
        """Return the output of a command; "" if it fails or does not answer."""
        return self.answer(*args) or ""

    def answer(self, *args: str) -> str | None:
        """Return the output of a command; None if it fails or does not answer."""
        try:
            done = subprocess.run(
                self.command(args),
                check=False,
                capture_output=True,
                encoding="utf-8",
                env=self.environ(),
                # ssh would read from the caller's standard input.
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
        if time.monotonic() - self._asked > _STATE_DELAY:
            self._state = self._allocation.state()
            self._asked = time.monotonic()
            self.queues = bool(self._allocation.job)  # otherwise sbatch has not answered yet
        return self._state

    def start(self, machine: int) -> Ends:
        node = self._allocation.nodes[machine]
        # --overlap: otherwise the step would wait until other steps have freed their resources.
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
        """Return why the machine was lost, as the job's state, the node's state and srun tell; "" if unknown."""
        node = self._allocation.nodes[machine]
        ended = self._processes.fate(machine, f"srun on {node}")
        return fate_of(self._shell, self._allocation.job, node) or ended

    def cancel(self) -> None:
        self._allocation.release()  # first, since the rest may be interrupted; the job ends after its members
        self._processes.end()
        self._allocation.wait()


class Allocation:
    """An allocation that mlaunch asks for. ``flags``: sbatch's; ``count``: of nodes.

    ``job`` and ``nodes`` are set once it is there. ``patience``: seconds for which the job stays without a member;
    None: until its time is over.
    """

    def __init__(self, shell: Shell, flags: Sequence[str], count: int, patience: float | None) -> None:
        self._shell = shell
        self.count = count
        self.job = ""
        self.nodes: list[str] = []
        self._said = ""
        self._name = f"mlaunch-{uuid.uuid4().hex[:12]}"
        self.farewell: Sequence[str] = ["scancel", "--quiet", f"--name={self._name}"]
        runs = "exec sleep infinity" if patience is None else _STAY % max(_LEAST_STAY, math.ceil(patience))
        try:
            self._guard = self._start(_GUARD, *flags, f"--wrap={runs}")
        except OSError as error:
            raise LaunchError(f"Slurm cannot be asked: {error}") from error

    def _start(self, script: str, *args: str) -> subprocess.Popen[bytes]:
        guard = subprocess.Popen(
            self._shell.command(["sh", "-c", script, self._name, *args]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._shell.environ(),
            # Ctrl-C in a terminal must not end the guard, which gives the job back.
            start_new_session=True,
        )
        if guard.stdin is not None:
            close_in_forks(guard.stdin)
        return guard

    def state(self) -> str:
        """Return what the job waits for; "" once the nodes are there. LaunchError, in Slurm's words: none will come."""
        asked = self._hear()
        if asked is None:
            return "asks Slurm for an allocation"
        code, self.job = asked
        if code != "0" or not self.job:
            raise LaunchError("\n".join(["Slurm gives no allocation:", *(f"  {line}" for line in self._words())]))
        # By the job's name, which is random: a number is reused, and is not known before sbatch has answered.
        known = self._shell.answer("squeue", "--noheader", "--states=all", f"--name={self._name}", "--format=%T %r")
        if known is None:
            return f"job {self.job} waits, and Slurm does not say for what: its controller does not answer"
        state, _, reason = known.partition(" ")
        if state == "PENDING":
            return f"job {self.job} is queued by Slurm ({reason or 'no reason given'})"
        if state in {"CONFIGURING", "SUSPENDED"}:
            return f"job {self.job} is {state.lower()}"
        if state != "RUNNING":
            raise LaunchError(f"Slurm has ended job {self.job} before it was used: {known or 'it no longer knows it'}")
        self.nodes = nodes_of(self._shell, self.job)
        return ""

    def _hear(self) -> tuple[str, str] | None:
        """Read the guard's output. Return sbatch's exit status and the job's number once they are known."""
        pipe = self._guard.stdout
        while pipe is not None and linux.wait_readable([pipe.fileno()], 0.0):
            data = os.read(pipe.fileno(), _READ)
            if not data:
                return self._asked() or ("255", "")
            self._said += data.decode(errors="replace")
        return self._asked()

    def _asked(self) -> tuple[str, str] | None:
        found = re.search(rf"^{self._name} asked (\d+) (\d*)$", self._said, re.MULTILINE)
        return (found[1], found[2]) if found else None

    def _words(self) -> list[str]:
        return [line for line in self._said.splitlines() if line and not line.startswith(self._name)]

    def preempted(self) -> bool:
        """True if Slurm has preempted the job, or has asked it to end for another job."""
        known = self._shell.ask("scontrol", "--oneliner", "show", "job", self.job)
        return bool(re.search(r"\bPreemptTime=\d", known)) or _ended(self._shell, self.job).startswith("PREEMPTED")

    def release(self) -> None:
        """Give the job back without waiting, even if the guard is stopped. May be called again."""
        # A stopped guard would not see the end of its input, and the job would stay.
        linux.continue_group_of(self._guard.pid)
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def wait(self) -> None:
        """Wait a while for Slurm to confirm ``release``; print if it does not. Call it again after an interrupt."""
        if self._confirms() is False:  # the guard was killed
            _let_go(self._guard)
            self._guard = self._start(_GIVE_BACK)
        self.release()
        if not self._confirms():
            what = f"job {self.job}" if self.job else "the job that was asked for"
            say(
                f"Slurm has not confirmed that {what} has ended, and is asked again for some minutes (does its "
                f"controller answer?); if it stays: {shlex.join(self.farewell)}"
            )
        _let_go(self._guard)

    def _confirms(self) -> bool | None:
        """Return True if the job was given back, False if it was not, None while the guard still tries."""
        try:
            return self._guard.wait(_END_TIMEOUT) == 0
        except subprocess.TimeoutExpired:
            return None


def _let_go(guard: subprocess.Popen[bytes]) -> None:
    if guard.stdout is not None:
        guard.stdout.close()


class Existing:
    """The job that this process runs in, which mlaunch does not end. ``machines``: how many of its nodes; None: all."""

    def __init__(self, shell: Shell, job: str, machines: int | None) -> None:
        self._shell = shell
        self.farewell: Sequence[str] = ()
        self.job = job
        nodes = nodes_of(shell, job)
        if machines is not None and machines > len(nodes):
            raise ValueError(f"machines={machines}: job {job} has {len(nodes)} nodes; allowed: 1 to {len(nodes)}")
        self.nodes = nodes[:machines]
        self.count = len(self.nodes)

    def state(self) -> str:
        return ""

    def preempted(self) -> bool:
        """Return False: this process ends with the job."""
        return False

    def release(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


def nodes_of(shell: Shell, job: str) -> list[str]:
    """Return the names of a job's nodes, in Slurm's order. LaunchError if Slurm does not name them."""
    short = shell.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    nodes = shell.ask("scontrol", "show", "hostnames", short).split() if short else []
    if not nodes:
        raise LaunchError(f"Slurm does not say which nodes job {job} has: does squeue --jobs={job} know it?")
    return nodes


def fate_of(shell: Shell, job: str, node: str) -> str:
    """Return in Slurm's words what ended a job, or what is wrong with a node; "" if Slurm reports nothing."""
    state = _ended(shell, job)
    if state.startswith(_BAD):
        return f"{state} (job {job}, node {node})"
    known = shell.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T")
    return f"node {node} is {known}" if known.startswith(("down", "drain", "fail", "unk")) else ""


def _ended(shell: Shell, job: str) -> str:
    """Return the final state of a job. A job is "COMPLETING" until its nodes have been cleaned up."""
    until = time.monotonic() + _COMPLETING_TIMEOUT
    while (state := _state_of(shell, job)) == "COMPLETING" and time.monotonic() < until:
        linux.wait_readable([], _COMPLETING_DELAY)
    return state


def _state_of(shell: Shell, job: str) -> str:
    return shell.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
