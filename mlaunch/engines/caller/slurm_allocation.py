"""An allocation of Slurm's: one that is asked for and given back, or the one that this process is in."""

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
from typing import Protocol

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.fds import close_in_forks
from mlaunch.engines.caller.launch.machines import say

# Ends the job of this name, after its members, which end with the caller, too, and tidy up: they have ten seconds. Asks
# again until Slurm says that there is none. $0 is the name, which nobody else has.
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
# Asks, says how that ended, and gives the job back when its standard input ends: with the caller, however that ends,
# and also while the job still waits. The number is the last line that is one; a site may have more to say. "127": there
# is no such program, nor one to give back with.
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
# What the job itself runs: it ends when no member has been there for a lease. The caller may be asleep, or gone without
# a word, before it has started one. A controller that does not answer is asked again.
_LEASE = """
while sleep %d; do
    steps=$(squeue --noheader --steps --jobs=$SLURM_JOB_ID --format=%%i) || continue
    case "$steps" in *.[0-9]*) ;; *) exit 0 ;; esac
done
"""
_LEAST_LEASE = 10  # seconds for a caller to see that the job has begun, and to start members
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

    def answer(self, *args: str) -> str | None: ...


class Allocation:
    """Asks for it. ``flags``: of sbatch; ``count``: of nodes. ``job`` and ``nodes`` are there once it is.

    ``lease``: seconds for which the job stays though nobody is there; None: until its time is over.
    """

    def __init__(self, shell: Asking, flags: Sequence[str], count: int, lease: float | None) -> None:
        self._shell = shell
        self.count = count
        self.job = ""
        self.nodes: list[str] = []
        self._said = ""
        self._name = f"mlaunch-{uuid.uuid4().hex[:12]}"
        self.farewell: Sequence[str] = ["scancel", "--quiet", f"--name={self._name}"]
        runs = "exec sleep infinity" if lease is None else _LEASE % max(_LEAST_LEASE, math.ceil(lease))
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
        """Says what the job waits for; "" once the nodes are there. LaunchError, in Slurm's words: there are none."""
        asked = self._hear()
        if asked is None:
            return "asks Slurm for an allocation"
        code, self.job = asked
        if code != "0" or not self.job:
            raise LaunchError("\n".join(["Slurm gives no allocation:", *(f"  {line}" for line in self._words())]))
        # By the job's name, which is drawn: a number is reused, and is not known before sbatch has answered.
        known = self._shell.answer("squeue", "--noheader", "--states=all", f"--name={self._name}", "--format=%T %r")
        if known is None:
            return f"job {self.job} waits, and Slurm does not say for what: its controller does not answer"
        state, _, reason = known.partition(" ")
        if state == "PENDING":
            return f"job {self.job} is queued by Slurm ({reason or 'no reason given'})"
        if state in {"CONFIGURING", "SUSPENDED"}:
            return f"job {self.job} is {state.lower()}"
        if state != "RUNNING":
            raise LaunchError(f"Slurm has ended job {self.job} before it was used: {known or 'it knows it no more'}")
        self.nodes = nodes_of(self._shell, self.job)
        return ""

    def _hear(self) -> tuple[str, str] | None:
        """Takes in what has been said; returns the exit status and the job's number once they are known."""
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

    def fate(self, node: str) -> str:
        """Says what has become of the job, or of a node; "" if nothing has."""
        return fate_of(self._shell, self.job, node)

    def preempted(self) -> bool:
        """Tells whether the job gives way to another one: from the moment on at which it is asked to."""
        known = self._shell.ask("scontrol", "--oneliner", "show", "job", self.job)
        return bool(re.search(r"\bPreemptTime=\d", known)) or _ended(self._shell, self.job).startswith("PREEMPTED")

    def release(self) -> None:
        """Gives it back, without waiting, also if somebody has stopped the guard. May be called again."""
        # A guard that somebody has stopped would not see the end of its input, and the job would stay.
        linux.continue_group_of(self._guard.pid)
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def wait(self) -> None:
        """Waits a while until that is confirmed; what is not is told. May be called again if it was interrupted."""
        if self._confirms() is False:  # somebody has killed it
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
        """Tells whether it was given back; None: that is still being tried."""
        try:
            return self._guard.wait(_END_TIMEOUT) == 0
        except subprocess.TimeoutExpired:
            return None


def _let_go(guard: subprocess.Popen[bytes]) -> None:
    if guard.stdout is not None:
        guard.stdout.close()


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

    def preempted(self) -> bool:
        """Says no: this process ends with the job."""
        return False

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
    """Says in Slurm's words what ended a job, or what is wrong with a node; "" if it knows of nothing."""
    state = _ended(shell, job)
    if state.startswith(_BAD):
        return f"{state} (job {job}, node {node})"
    known = shell.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T")
    return f"node {node} is {known}" if known.startswith(("down", "drain", "fail", "unk")) else ""


def _ended(shell: Asking, job: str) -> str:
    """Returns the state of a job. One that ends is "COMPLETING" first, until its nodes have been tidied up."""
    until = time.monotonic() + _COMPLETING_TIMEOUT
    while (state := _state_of(shell, job)) == "COMPLETING" and time.monotonic() < until:
        linux.wait_readable([], _LOOK_DELAY)
    return state


def _state_of(shell: Asking, job: str) -> str:
    return shell.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
