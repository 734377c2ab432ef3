"""The programs on this machine through which an engine reaches others: ``ssh``, ``srun``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from mlaunch.base import linux
from mlaunch.base.exceptions import describe_exit
from mlaunch.engines.caller.placement import Ends

_FATE_TIMEOUT = 1.0  # seconds for a program whose streams have ended
_END_TIMEOUT = 3.0  # seconds for all whose standard input has ended, and for those that were asked to end


class Processes:
    """One for each machine, by its number."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, machine: int, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ends:
        """Starts one; returns our ends of its streams. OSError as ``subprocess.Popen`` raises it."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # a terminal's Ctrl-C is this process's to answer
        )
        self._running[machine] = process
        ours = [stream for stream in (process.stdin, process.stdout, process.stderr) if stream is not None]
        # Duplicates that Popen knows nothing of: it would close them when it is collected.
        ends = [os.dup(stream.fileno()) for stream in ours]
        for stream in ours:
            stream.close()
        process.stdin = process.stdout = process.stderr = None
        return Ends(*ends)

    def stopped(self, machine: int) -> int:
        """Returns the pid of one that somebody has stopped (SIGSTOP, a debugger); 0: it runs, or there is none."""
        process = self._running.get(machine)
        return process.pid if process is not None and linux.is_stopped(process.pid) else 0

    def fate(self, machine: int, name: str) -> str:
        """Says how it has ended, or that somebody has stopped it; "" if it lives."""
        process = self._running.get(machine)
        if process is None:
            return ""
        if pid := self.stopped(machine):
            return f"{name} (pid {pid}) is stopped; kill -CONT {pid} continues it"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"{name} {describe_exit(process.wait(_FATE_TIMEOUT), of_python=False)}"
        return ""

    def end(self) -> None:
        """Ends all. Their standard input is closed by now, at which they end by themselves.

        What somebody has stopped goes on first, helpers of theirs, too, which would stay.
        """
        # Time to tidy up first: they end with their standard input, as their caller's streams are closed by now.
        self._wait()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._running.values():
                if process.poll() is None:
                    end(process)
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + _END_TIMEOUT
        for process in self._running.values():
            # A stopped srun keeps its helper, which has the job's step.
            linux.continue_group_of(process.pid)
        for process in self._running.values():
            if process.returncode is None and _has_ended(process.pid, max(0.0, until - time.monotonic())):
                linux.continue_group_of(process.pid)  # as long as its number is certainly its own
                process.wait()


def _has_ended(pid: int, timeout: float) -> bool:
    """Waits for the end of a child, without reaping it; True once that has come."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:  # others have reaped it
        return True
    try:
        return bool(linux.wait_readable([pidfd], timeout))
    finally:
        os.close(pidfd)
