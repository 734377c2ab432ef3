"""What one machine of a launch is asked for, and can give."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import sys
import tempfile
import time

from mlaunch.caller.launch.plan import Attempt, ThisMachine, place, plan
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.server.warm import warm_server
from mlaunch.engines.wire.member_messages import AskOffer, Offer, Start
from mlaunch.protocol.spec import LaunchSpec, Nodes, Target, with_details
from mlaunch.rendezvous.address import addresses, identity, is_taken

_STREAMS = (1, 2)
_PORTS = range(15000, 25000)


class MachinePlan:
    """Raises ValueError or LaunchError for what this machine cannot give."""

    def __init__(self, order: AskOffer) -> None:
        self._order = order
        self._options = Options(**order.options)
        # This machine's own: paths and devices of the caller's mean nothing here.
        self._environ = {**os.environ, **(self._options.env or {})}
        self._cwd = order.cwd if os.path.isdir(order.cwd) else os.getcwd()
        self.server = warm_server.get(self._environ)
        ready = self.server.ready(self._options.join_timeout)  # a caller waits no longer, and one that is stopped stays
        self._machine = ThisMachine(ready, self.server.count_devices)
        self._placed = place(self._options, self._machine, self._environ)

    def prepared(self) -> Offer:
        """Says what it can give."""
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
        """Returns the launch on this machine."""
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
        # A script's modules are looked for beside it first, a function's where the machine has its own.
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
    """Returns the launch of what a feature runs, which binds its devices itself."""
    own = dataclasses.replace(target, run_id=target.run_id or spec.launch_id, temporary=tempfile.gettempdir())
    nodes = Nodes(order.node_rank, order.num_nodes)
    return dataclasses.replace(spec, devices=dataclasses.replace(spec.devices, type=""), target=own, nodes=nodes)


def _free_port() -> int:
    """Returns a port at which nobody listens, of those that the system gives to no client."""
    # Drawn: two launches that ask at the same time would both find the first one free.
    for port in random.SystemRandom().sample(_PORTS, 100):
        if not is_taken(port):
            return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free here; give port=")
