"""Machines of any program that starts a process on each and joins their standard streams."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
from collections.abc import Sequence

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError
from mlaunch.engines.caller.engine import Engine, Words
from mlaunch.engines.caller.machines import printable_line
from mlaunch.engines.caller.placement import Ends, Placement, Processes
from mlaunch.engines.wire.first_process import MARK, CarriedStream, Lead, Mux, ProcessAddress
from mlaunch.engines.wire.frame_stream import FrameStream

_MODULE = "mlaunch.engines.member.started_together"
_READ = 65536
_KEPT = 4096  # bytes of its standard error that are kept


class Command(Engine):
    """The machines of ``mpirun``, ``flux run``, ``pbsdsh`` or a similar program, which must start one process on each.

    The machines must reach each other by TCP, at ports that the system chooses.

    Args:
        command: "mpirun -N 1 --host a,b"; mlaunch appends the command that it is to start.
        python: The interpreter there; None: the path of this one.
    """

    def __init__(self, command: str | Sequence[str], *, python: str | None = None) -> None:
        super().__init__(python)
        words = shlex.split(command) if isinstance(command, str) else command
        if not words:
            raise ValueError("Command: allowed: a command that starts a process on each machine, 'mpirun -N 1'")
        Words("mpirun", "-N", "1", or_text=True).check("command", words)
        self._command = list(words)

    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        return _Started([*self._command, *command[:-1], _MODULE], machines)

    def __repr__(self) -> str:
        return f"Command({shlex.join(self._command)!r})"


class _Started(Placement):
    def __init__(self, command: Sequence[str], machines: int | None) -> None:
        self.sizes: Sequence[int | None] = []
        self._name = command[0]
        self._wanted = machines
        self._processes = Processes()
        try:
            ends = self._processes.start(0, command)
        except OSError as error:
            raise LaunchError(f"{self._name} cannot be run here: {error.strerror}") from error
        self._stream: CarriedStream = FrameStream(ends.stdout, ends.stdin)
        self._stderr = ends.stderr
        self._words = b""
        self._found: list[ProcessAddress] = []
        self._ordered: list[ProcessAddress] = []  # as the machines are numbered
        self._streams: dict[int, socket.socket] = {}

    def state(self) -> str:
        self._hear_stderr()
        try:
            while (line := self._stream.skip_to(MARK)) is not None:
                with contextlib.suppress(ConnectionError):  # the line is not a member's
                    self._found.append(ProcessAddress.of_line(line))
        except EOFError:
            raise LaunchError(self._why_not()) from None
        sizes = [where.size for where in self._found if where.size]
        wanted = self._wanted or next(iter(sizes), 0)
        if self._found and not wanted:
            raise LaunchError(f"{self._name} does not tell its processes how many they are; give machines=")
        stopped = self._processes.stopped(0)
        self.queues = not self._found and not stopped  # once it has started one process, no queue delays the others
        if not self._found or len(self._found) < wanted:
            started = f"started {len(self._found)} of {wanted or 'its'} processes"
            if stopped:
                return f"{self._name} (pid {stopped}) is stopped, and has {started}; kill -CONT {stopped} continues it"
            return f"{self._name} has {started}"
        if not self._streams:
            self._lead()
        return ""

    def _lead(self) -> None:
        """Make the first process carry the streams of all."""
        if self._wanted is not None and len(self._found) > self._wanted:
            raise LaunchError(f"{self._name} has started {len(self._found)} processes, but machines={self._wanted}")
        self._ordered = ordered = sorted(self._found, key=lambda where: where.number)
        self.sizes = [None] * len(ordered)
        # One program has one stream for all: a line feed after each frame keeps frames whole on its way (Slurm's step
        # daemon passes on whole lines).
        self._stream.send(Lead(ordered[0].name, dict(enumerate(ordered))))
        theirs = {}
        for place in range(len(ordered)):
            self._streams[place], theirs[place] = socket.socketpair()
        # A daemon: at the interpreter's end the stream closes, which is what the other side waits for.
        threading.Thread(target=self._carry, args=(Mux(self._stream, theirs),), daemon=True).start()

    def _carry(self, mux: Mux) -> None:
        mux.run()
        self._stream.close()

    def start(self, machine: int) -> Ends:
        end = self._streams[machine].detach()
        if machine == 0:  # the program's standard error counts as the first machine's
            return Ends(os.dup(end), end, os.dup(self._stderr) if self._stderr >= 0 else -1)
        return Ends(os.dup(end), end, secret=self._ordered[machine].secret)

    def _hear_stderr(self) -> None:
        while linux.wait_readable([self._stderr], 0.0):
            data = os.read(self._stderr, _READ)
            if not data:
                return
            # Read it in any case: a program whose standard error is full would stop.
            self._words = (self._words + data)[-_KEPT:]

    def _why_not(self) -> str:
        """Return in words why the program has not started the processes."""
        self._hear_stderr()
        fate = self._processes.fate(0, self._name) or f"{self._name} closed its output"
        lines = [printable_line(line) for line in self._words.splitlines() if line.strip()]
        return "\n".join([f"mlaunch did not start on the machines: {fate}", *(f"  {line}" for line in lines)])

    def fate(self, machine: int) -> str:
        known = self._processes.fate(0, self._name)
        return f"{known}; machine {machine} was among those that it had started" if known else ""

    def cancel(self) -> None:
        for stream in self._streams.values():
            stream.close()
        if not self._streams:
            self._stream.close()
        with contextlib.suppress(OSError):
            os.close(self._stderr)
        self._processes.end()
