"""A member: the process that an engine starts on each machine, by ``python -m mlaunch.engines.member.main``.

A member has a warm fork server, and starts the ranks of its machine as a script there would. It receives its orders,
secrets among them, on standard input, and writes its records to standard output. The member and its ranks end when its
standard input does, so a machine that loses its caller is free again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.base.fds import ready
from mlaunch.caller.server.warm import warm_server
from mlaunch.core.load import MachineParts
from mlaunch.engines.member.heartbeat import CallersHeartbeat
from mlaunch.engines.member.machine_launch import MachineLaunch
from mlaunch.engines.member.machine_plan import MachinePlan, failures_at, listen_for_others
from mlaunch.engines.wire.frame_stream import FrameStream, NoiseError
from mlaunch.engines.wire.member_messages import (
    MARK,
    AskOffer,
    Heartbeat,
    Listen,
    Listens,
    MachineDone,
    NotPrepared,
    Reach,
    Reached,
    Start,
    patience_of,
    versions,
)
from mlaunch.protocol.channel import assert_never
from mlaunch.protocol.messages import Cancel, EndCall, EndRanks, ForPart, MeetAgain, NextCall, Question

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import MemberHears, MembersStream

# Variables for the member only: ranks that see them would take themselves for the engine's tasks.
_TASKS = ("SLURM_STEP", "SLURM_SRUN", "SLURM_CPU_BIND", "SLURM_TASK", "PMI_", "PMIX_", "OMPI_")
_TASK = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_LAUNCH_NODE_IPADDR"}
# Slurm and mpirun send these to all processes that they have started, if a user asks for it; members are not meant.
FOR_RANKS = {signal.SIGUSR1, signal.SIGUSR2}


def main(secret: str = "") -> NoReturn:
    """Serve until standard input ends. ``secret``: shared with the caller, if others can write to the connection."""
    ignore(FOR_RANKS)
    stream = _take_over_streams(secret)
    for name in [name for name in os.environ if name.startswith(_TASKS) or name in _TASK]:
        del os.environ[name]
    code = 1
    try:
        serve(stream, socket.gethostname(), patience_of(sys.argv))
        code = 0
    finally:
        warm_server.close()
        sys.stderr.flush()
        # Threads of libraries or of the user's preloads must not keep the machine from being given back.
        os._exit(code)


def ignore(numbers: Collection[signal.Signals]) -> None:
    """Make this process survive these signals. Its ranks have the usual dispositions."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _take_over_streams(secret: str) -> MembersStream:
    """Return a stream over standard input and output. Anything else that is printed here goes to standard error."""
    ends = linux.above_standard(os.dup(0)), linux.above_standard(os.dup(1))
    stream: MembersStream = FrameStream(*ends, secret, member=True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # A library that prints would write between the frames.
    os.dup2(2, 1)
    os.close(null)
    return stream


def serve(stream: MembersStream, host: str, patience: float | None = None) -> None:
    """Serve a caller until its end of the stream is closed, or nothing has come in ``patience`` seconds."""
    hello = {**versions(), "host": host, "pid": os.getpid()}
    stream.write_line(MARK, json.dumps(hello).encode())
    _Member(stream, patience).serve()


class _Member:
    def __init__(self, stream: MembersStream, patience: float | None) -> None:
        self._stream = stream
        self._heartbeat = CallersHeartbeat(stream)
        self._heartbeat.last = None if patience is None else Heartbeat(patience, ())
        self._plan: MachinePlan | None = None
        self._listener: socket.socket | None = None

    def serve(self) -> None:
        while not self._heartbeat.over:
            try:
                found = self._stream.receive(1)  # the launch itself receives what follows its start
            except EOFError:
                return
            except NoiseError as error:
                print(f"mlaunch: the caller {error}{error.hint}", file=sys.stderr, flush=True)
                return
            for record, content in found:
                self._obey(record, content)
            if not found:
                self._wait()
        self._heartbeat.leave()

    def _wait(self) -> None:
        writers = [self._stream.outgoing] if self._stream.unsent else []
        ready([self._stream.incoming], writers, self._heartbeat.milliseconds())
        self._stream.flush()

    def _obey(self, record: MemberHears, content: int) -> None:
        match record:
            case Heartbeat():
                self._heartbeat.last = record
            case AskOffer():
                self._prepare(record)
            case Listen():
                self._stream.send(Listens(record.number, self._listen(record.port)))
            case Reach():
                self._stream.send(Reached(record.number, failures_at(record.addresses, record.port)))
            case Start():
                if self._plan is not None:
                    self._listen(None)
                    self._start(self._plan, record, content)
            case Question() | Cancel() | NextCall() | EndCall() | MeetAgain() | EndRanks() | ForPart():
                pass  # the launch that it is about is over
            case _:
                assert_never(record)
        if content >= 0:
            os.close(content)

    def _prepare(self, order: AskOffer) -> None:
        try:
            self._plan = MachinePlan(order)
            self._stream.send(self._plan.prepared())
        except (LaunchError, ValueError, OSError) as error:
            self._stream.send(NotPrepared(order.number, f"{type(error).__name__}: {error}"))

    def _listen(self, port: int | None) -> bool:
        if self._listener is not None:
            self._listener.close()
        self._listener = listen_for_others(port)
        return self._listener is not None

    def _start(self, plan: MachinePlan, order: Start, content: int) -> None:
        with contextlib.ExitStack() as stack:
            try:
                parts = stack.enter_context(MachineParts(plan.spec(order)))
                launch = MachineLaunch(self._stream, parts, plan.server, content, self._heartbeat)
            except (LaunchError, ValueError, OSError) as error:
                self._stream.send(MachineDone(f"{type(error).__name__}: {error}", isinstance(error, LaunchTimeout)))
                return
            launch.run()
