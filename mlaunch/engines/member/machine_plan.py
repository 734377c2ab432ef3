"""The ranks and devices that one machine can give to a launch, and the address at which the others reach it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

from mlaunch.base.fds import ready
from mlaunch.caller.launch.plan import Attempt, ThisMachine, place, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.server.warm import warm_server
from mlaunch.engines.wire.member_messages import AskOffer, Offer, Start
from mlaunch.protocol.spec import LaunchSpec, Nodes, Target, with_details
from mlaunch.rendezvous.address import addresses, identity, is_taken

_STREAMS = (1, 2)
_PORTS = range(15000, 25000)
_PATIENCE = 5.0  # seconds for an address to answer


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

    def prepared(self) -> Offer:
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
        numbers = [_begin(end, address, port) for end, address in zip(ends, addresses, strict=True)]
        _wait([end for end, number in zip(ends, numbers, strict=True) if number == errno.EINPROGRESS])
        return tuple(_failure_of(end, number) for end, number in zip(ends, numbers, strict=True))
    except OSError as error:  # a name that does not resolve
        return (f"{error.strerror or error}",) * len(ends)
    finally:
        for end in ends:
            end.close()


def _begin(end: socket.socket, address: str, port: int) -> int:
    # All at once: an address of another network may be silent, for minutes.
    end.setblocking(False)
    return end.connect_ex((address, port))


def _wait(ends: Sequence[socket.socket]) -> None:
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
