"""A member: the process that an engine starts on each machine, by ``python -m mlaunch.engines.member.main``.

A member has a warm fork server, and starts the ranks of its machine as a script there would. It receives its orders,
secrets among them, on standard input, and writes its records to standard output. The member and its ranks end when its
standard input does, so a machine that loses its caller is free again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.base.fds import ready
from mlaunch.caller.launch.plan import Attempt, ThisMachine, place, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.warm_server import warm_server
from mlaunch.core.load import MachineParts
from mlaunch.engines.member.machine_launch import CallersHeartbeat, MachineLaunch
from mlaunch.engines.wire import (
    MARK,
    AskOffer,
    Heartbeat,
    Listen,
    Listens,
    MachineDone,
    MemberHears,
    MembersStream,
    NoOffer,
    Offer,
    Reach,
    Reached,
    Start,
    patience_of,
    versions,
)
from mlaunch.engines.wire.frame_stream import FrameStream, NoiseError
from mlaunch.protocol.channel import assert_never
from mlaunch.protocol.messages import Cancel, EndCall, EndRanks, ForPart, MeetAgain, NextCall, Question
from mlaunch.protocol.spec import LaunchSpec, Nodes, Target, with_details
from mlaunch.rendezvous.address import addresses, identity, is_taken

# Variables for the member only: ranks that see them would take themselves for the engine's tasks.
_TASKS = ("SLURM_STEP", "SLURM_SRUN", "SLURM_CPU_BIND", "SLURM_TASK", "PMI_", "PMIX_", "OMPI_")
_TASK = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_LAUNCH_NODE_IPADDR"}
# Slurm and mpirun send these to all processes that they have started, if a user asks for it; members are not meant.
FOR_RANKS = {signal.SIGUSR1, signal.SIGUSR2}
_STREAMS = (1, 2)
_PORTS = range(15000, 25000)
_PATIENCE = 5.0  # seconds for an address to answer


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
                self._offer(record)
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

    def _offer(self, order: AskOffer) -> None:
        try:
            self._plan = MachinePlan(order)
            self._stream.send(self._plan.offer())
        except (LaunchError, ValueError, OSError) as error:
            self._stream.send(NoOffer(order.number, f"{type(error).__name__}: {error}"))

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


class MachinePlan:
    """The plan of a launch on this machine. ValueError or LaunchError if the machine cannot give what is asked for."""

    def __init__(self, order: AskOffer) -> None:
        self._order = order
        self._options = Options(**order.options)
        # This machine's own: paths and devices of the caller's mean nothing here.
        self._environ = {**os.environ, **(self._options.env or {})}
        self._cwd = order.cwd if os.path.isdir(order.cwd) else os.getcwd()
        self.server = warm_server.get(self._environ)
        # Not longer: the caller stops waiting then, and a server that is stopped would never answer.
        ready = self.server.ready(self._options.join_timeout)
        self._machine = ThisMachine(ready, self.server.count_devices)
        self._placed = place(self._options, self._machine, self._environ)

    def offer(self) -> Offer:
        """Return what this machine can give."""
        return Offer(
            self._order.number,
            self._placed.local_world_size,
            self._placed.device_type,
            self._placed.visible_devices,
            self._machine.ready.torch_version,
            tuple(addresses()) or (socket.gethostname(),),
            identity(),
            _free_port(),
            time.monotonic(),
        )

    def spec(self, order: Start) -> LaunchSpec:
        """Return the launch on this machine."""
        alone = order.world_size == self._placed.local_world_size
        own = {
            "n_gpus": self._placed.local_world_size,
            "world_size": order.world_size,
            "rank_start": order.rank_start,
            "master_ip": "localhost" if alone else order.master_ip,
            "port": 0 if alone else order.port,
            "token": order.token,
        }
        attempt = Attempt(order.restart_count, order.details.call.time_left)
        spec = plan(self._options.replaced(own), self._machine, self._order.name, self._environ, attempt)
        spec = with_details(spec, order.details)
        # Modules of a script are found beside it first, those of a function where this machine has its own.
        first, then = (self._order.sys_path, sys.path) if order.target else (sys.path, self._order.sys_path)
        path = dict.fromkeys([*first, *then])
        context = dataclasses.replace(spec.context, cwd=self._cwd, sys_path=tuple(path), main_file=None, main_name=None)
        spec = dataclasses.replace(spec, context=context, piped=(_STREAMS,) * spec.local_world_size)
        spec = dataclasses.replace(spec, sections=order.sections)
        if spec.cluster is not None:
            spec = dataclasses.replace(spec, cluster=dataclasses.replace(spec.cluster, by_engine=True))
        if order.stays:
            spec = dataclasses.replace(spec, launch_id=order.stays, stays=True)
        return spec if order.target is None else _of_target(spec, order.target, order)


def _of_target(spec: LaunchSpec, target: Target, order: Start) -> LaunchSpec:
    """Return the launch of a feature's target, whose ranks bind their devices themselves."""
    own = dataclasses.replace(target, run_id=target.run_id or spec.launch_id, temporary=tempfile.gettempdir())
    nodes = Nodes(order.node_rank, order.num_nodes)
    return dataclasses.replace(spec, devices=dataclasses.replace(spec.devices, type=""), target=own, nodes=nodes)


def _free_port() -> int:
    """Return a free port outside the range that the system gives to clients."""
    # At random: two launches that ask at the same time would both find the first one free.
    for port in random.SystemRandom().sample(_PORTS, 100):
        if not is_taken(port):
            return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free here; give port=")


def listen_for_others(port: int | None) -> socket.socket | None:
    """Return a socket that listens on all addresses; None if the port is taken. The kernel accepts connections."""
    try:
        return None if port is None else socket.create_server(("", port))
    except OSError:
        return None


def failures_at(addresses: Sequence[str], port: int) -> tuple[str, ...]:
    """Connect to all addresses at once. Return for each why there is no answer; "" if there is one."""
    ends = [socket.socket() for _ in addresses]
    try:
        numbers = [_connect(end, address, port) for end, address in zip(ends, addresses, strict=True)]
        _wait_for_answers([end for end, number in zip(ends, numbers, strict=True) if number == errno.EINPROGRESS])
        return tuple(_failure_of(end, number) for end, number in zip(ends, numbers, strict=True))
    except OSError as error:  # a name that does not resolve
        return (f"{error.strerror or error}",) * len(ends)
    finally:
        for end in ends:
            end.close()


def _connect(end: socket.socket, address: str, port: int) -> int:
    # All at once: an address of another network may be silent, for minutes.
    end.setblocking(False)
    return end.connect_ex((address, port))


def _wait_for_answers(ends: Sequence[socket.socket]) -> None:
    """Wait until all connections have an answer, or for a few seconds."""
    waiting, until = {end.fileno() for end in ends}, time.monotonic() + _PATIENCE
    while waiting and (left := until - time.monotonic()) > 0:
        waiting -= ready([], waiting, 1000 * left)


def _failure_of(end: socket.socket, number: int) -> str:
    if number == errno.EINPROGRESS:
        number = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number == 0:
        with contextlib.suppress(OSError):
            end.getpeername()
            return ""
        number = errno.ETIMEDOUT
    return os.strerror(number)
