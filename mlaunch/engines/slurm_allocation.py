"""An allocation of Slurm's: one that is asked for and given back, or the one that this process is in."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

from mlaunch.base import linux
from mlaunch.base.errors import LaunchError
from mlaunch.engines.forks import close_in_forks

# It asks, says how that ended, and gives the allocation back when its standard input ends: with the caller, however
# that ends, and also while the job still waits. Members end with the caller, too, and tidy up, for which they have ten
# seconds. $0 is the job's name, which nobody else has.
_GUARD = """
exec 3<&0
salloc --no-shell --job-name="$0" "$@" </dev/null &
asking=$!
{ cat <&3 >/dev/null; kill $asking 2>/dev/null; } &
caller=$!
wait $asking
echo "asked $?"
wait $caller
job=$(squeue --noheader --name="$0" --format=%i)
turn=0
while [ -n "$job" ] && [ $turn -lt 50 ] && squeue --noheader --steps --jobs="$job" --format=%i | grep -q '[.][0-9]'; do
    sleep 0.2
    turn=$((turn + 1))
done
exec scancel --quiet --name="$0"
"""
_JOB = re.compile(r"allocation (\d+)")
_BAD = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT")
_END_TIMEOUT = 10.0  # seconds for Slurm to take an allocation back
_COMPLETING_TIMEOUT = 5.0  # seconds for Slurm to say why a job has ended
_LOOK_DELAY = 0.1  # seconds between questions
_READ = 65536


class Asking(Protocol):
    """How Slurm's commands are run."""

    def command(self, args: Sequence[str]) -> list[str]: ...

    def environ(self) -> Mapping[str, str]: ...

    def ask(self, *args: str) -> str: ...


class Allocation:
    """Asks for it. ``flags``: of salloc; ``count``: of nodes. ``job`` and ``nodes`` are there once it is."""

    def __init__(self, shell: Asking, flags: Sequence[str], count: int) -> None:
        self._shell = shell
        self.count = count
        self.job = ""
        self.nodes: list[str] = []
        self._said = ""
        name = f"mlaunch-{uuid.uuid4().hex[:12]}"
        self.farewell: Sequence[str] = ["scancel", "--quiet", f"--name={name}"]
        command = ["sh", "-c", _GUARD, name, *flags]
        try:
            self._guard = subprocess.Popen(
                shell.command(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=shell.environ(),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"Slurm cannot be asked: {error}") from error
        if self._guard.stdin is not None:
            close_in_forks(self._guard.stdin)

    def state(self) -> str:
        """Says what the job waits for; "" once the nodes are there. LaunchError, in Slurm's words: there are none."""
        over = self._hear()
        job = _JOB.search(self._said)
        if over is None and job is None:
            return "asks Slurm for an allocation"
        if over is None and job is not None:
            known = self._shell.ask("squeue", "--noheader", f"--jobs={job[1]}", "--format=%T %r")
            state, _, reason = known.partition(" ")
            if state in {"", "PENDING"}:
                return f"job {job[1]} is queued by Slurm ({reason or 'no reason given'})"
            return f"job {job[1]} is {state.lower()}"
        if over != "0" or job is None:
            raise LaunchError("\n".join(["Slurm gives no allocation:", *(f"  {line}" for line in self._words())]))
        self.job, self.nodes = job[1], nodes_of(self._shell, job[1])
        return ""

    def _hear(self) -> str | None:
        """Takes in what it has said; returns salloc's exit status once that is known."""
        pipe = self._guard.stdout
        while pipe is not None and linux.wait_readable([pipe.fileno()], 0.0):
            data = os.read(pipe.fileno(), _READ)
            if not data:
                return self._asked() or "255"
            self._said += data.decode(errors="replace")
        return self._asked()

    def _asked(self) -> str | None:
        found = re.search(r"^asked (\d+)$", self._said, re.MULTILINE)
        return found[1] if found else None

    def _words(self) -> list[str]:
        return [line for line in self._said.splitlines() if line and not line.startswith("asked ")]

    def fate(self, node: str) -> str:
        """Says what has become of the job, or of a node; "" if nothing has."""
        return fate_of(self._shell, self.job, node)

    def release(self) -> None:
        """Gives it back, without waiting."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def wait(self) -> None:
        """Waits a while until that is done."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_END_TIMEOUT)
        if self._guard.stdout is not None:
            self._guard.stdout.close()


class Existing:
    """The job that this process runs in, which is not ours to end. ``machines``: how many of its nodes; None: all."""

    def __init__(self, shell: Asking, job: str, machines: int | None) -> None:
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

    def fate(self, node: str) -> str:
        """Says what has become of the job, or of a node; "" if nothing has."""
        return fate_of(self._shell, self.job, node)

    def release(self) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Does nothing."""


def nodes_of(shell: Asking, job: str) -> list[str]:
    """Returns the names of a job's nodes, in Slurm's order. LaunchError if it does not say them."""
    short = shell.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    nodes = shell.ask("scontrol", "show", "hostnames", short).split() if short else []
    if not nodes:
        raise LaunchError(f"Slurm does not say which nodes job {job} has: does squeue --jobs={job} know it?")
    return nodes


def fate_of(shell: Asking, job: str, node: str) -> str:
    """Says in Slurm's words what ended a job, or what is wrong with a node; "" if it knows of nothing.

    A job that ends is "COMPLETING" first, whatever ended it, until its nodes have been tidied up.
    """
    until = time.monotonic() + _COMPLETING_TIMEOUT
    while (state := _state_of(shell, job)) == "COMPLETING" and time.monotonic() < until:
        linux.wait_readable([], _LOOK_DELAY)
    if state.startswith(_BAD):
        return f"{state} (job {job}, node {node})"
    known = shell.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T")
    return f"node {node} is {known}" if known.startswith(("down", "drain", "fail", "unk")) else ""


def _state_of(shell: Asking, job: str) -> str:
    return shell.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
