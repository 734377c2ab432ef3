"""Placements, which engines give: a process on each of several machines, and news of its end."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchTimeout, describe_exit
from mlaunch.caller import interrupts

_FATE_TIMEOUT = 1.0  # seconds for a program to end once its streams have
_QUERY_DELAY = 0.1  # seconds between queries to the engine
_END_TIMEOUT = 3.0  # seconds for programs to end once their standard input has, and once they were asked to


@dataclass(frozen=True)
class Ends:
    """This process's ends of a process's standard streams: descriptors, which the receiver owns. ``stderr``: -1: none.

    ``secret``: shared with the process, if others can write to the connection.
    """

    stdin: int
    stdout: int
    stderr: int = -1
    secret: str = field(default="", repr=False, kw_only=True)


class Placement(ABC):
    """Machines that an engine gives to one launch, or to several one after the other.

    ``sizes``: how many ranks each machine has; None: the option ``n_gpus`` says it. ``at_once``: how many may start at
    a time; None: all. ``farewell``: a command that gives the machines back from one of them, if this process cannot;
    (): they are free as soon as nothing runs there. ``queues``: whether the state that ``state()`` reports may last as
    long as a queue does; False: no longer than ``join_timeout``.
    """

    sizes: Sequence[int | None]
    at_once: int | None = None
    farewell: Sequence[str] = ()
    queues: bool = True

    @abstractmethod
    def state(self) -> str:
        """Return what the machines wait for, in the engine's words; "" once they are there.

        Raises:
            LaunchError: They will not come.
        """

    @abstractmethod
    def start(self, machine: int) -> Ends:
        """Start the command on a machine, numbered from 0. Called once for each, when ``state()`` is ""."""

    @abstractmethod
    def fate(self, machine: int) -> str:
        """Return why a machine was lost, if the engine knows: "NODE_FAIL on n2", "exited with code 255"; else ""."""

    def preempted(self) -> bool:
        """True if the scheduler has taken the machines for somebody else, or is about to, and would give others.

        False if their time is over, or if the engine does not know.
        """
        return False

    @abstractmethod
    def cancel(self) -> None:
        """End all processes and give the machines back. Always called, and called again if it was interrupted."""


def wait_for(placement: Placement, timeout: float, tell: Callable[[str], None]) -> None:
    """Wait until the machines are there: for ``timeout`` seconds at most, unless they are in a queue."""
    told, until = "", math.inf
    while state := placement.state():
        if state != told:
            tell(state)
        until = math.inf if placement.queues else min(until, time.monotonic() + timeout)
        if time.monotonic() >= until:
            raise LaunchTimeout(
                f"the machines have not come within join_timeout={timeout:g} s: {state}. Is something stopped there, "
                f"or does it ask for input?"
            )
        told = state
        interrupts.wait_readable([], _QUERY_DELAY)  # a sleep that Ctrl-C ends at once


class Processes:
    """The programs on this machine through which an engine reaches others (``ssh``, ``srun``), by number."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, machine: int, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ends:
        """Start a program; return this process's ends of its streams. OSError as ``subprocess.Popen`` raises it."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # only this process reacts to a terminal's Ctrl-C
        )
        self._running[machine] = process
        ours = [stream for stream in (process.stdin, process.stdout, process.stderr) if stream is not None]
        # Duplicates: Popen would close its own when it is garbage-collected.
        ends = [os.dup(stream.fileno()) for stream in ours]
        for stream in ours:
            stream.close()
        process.stdin = process.stdout = process.stderr = None
        return Ends(*ends)

    def stopped(self, machine: int) -> int:
        """Return the pid of a machine's program if it is stopped (SIGSTOP, a debugger); 0 if it is not."""
        process = self._running.get(machine)
        return process.pid if process is not None and linux.is_stopped(process.pid) else 0

    def fate(self, machine: int, name: str) -> str:
        """Return in words how a machine's program has ended, or that it is stopped; "" if it runs."""
        process = self._running.get(machine)
        if process is None:
            return ""
        if pid := self.stopped(machine):
            return f"{name} (pid {pid}) is stopped; kill -CONT {pid} continues it"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"{name} {describe_exit(process.wait(_FATE_TIMEOUT), of_python=False)}"
        return ""

    def end(self) -> None:
        """End all programs. Their standard input is closed already, at which they end by themselves.

        A program that is stopped is continued first, with its helpers, which would otherwise stay.
        """
        # Time to clean up first.
        self._wait()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._running.values():
                if process.poll() is None:
                    end(process)
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _END_TIMEOUT
        for process in self._running.values():
            # A stopped srun keeps its helper, and that keeps the job's step.
            linux.continue_group_of(process.pid)
        for process in self._running.values():
            if process.returncode is None and _has_ended(process.pid, max(0.0, until - time.monotonic())):
                linux.continue_group_of(process.pid)  # while the pid certainly is its own
                process.wait()


def _has_ended(pid: int, timeout: float) -> bool:
    """Wait for the end of a child, without reaping it. Return True if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:  # other code has reaped it
        return True
    try:
        return bool(linux.wait_readable([pidfd], timeout))
    finally:
        os.close(pidfd)
