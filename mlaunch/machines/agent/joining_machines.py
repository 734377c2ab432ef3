"""The agent's way to the other machines of its launch: it joins at the gate, which the agent of rank 0 starts."""

from __future__ import annotations

import dataclasses
import errno
import socket
import time
from collections.abc import Iterable
from multiprocessing.connection import wait

from mlaunch._version import __version__
from mlaunch.agent.peers import Joined, NoLaunchError, refuse
from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.base.text import printable
from mlaunch.machines.agent.linked_peers import LinkedPeers, silence
from mlaunch.machines.gate.membership import Join
from mlaunch.machines.gate.store_process import GateConfig, StoreProcess
from mlaunch.machines.link.link_handle import Link
from mlaunch.machines.wire.link_messages import Planned
from mlaunch.protocol.messages import AgentsEnd, Refused, Waiting
from mlaunch.protocol.spec import Agreed, LaunchSpec, Nodes, Rendezvous, Restarts
from mlaunch.rendezvous.address import listen_as_master


def join_machines(
    spec: LaunchSpec,
    cluster: Rendezvous,
    listener: socket.socket,
    launcher: AgentsEnd,
    parent: int,
    held: Iterable[int],
) -> Joined:
    """Join the other machines of the launch, and return once all are there.

    ``held``: file descriptors that the link and the gate close, because they do not need them.

    Raises:
        NoLaunchError: The machines cannot join, or the launcher has given the launch up.
    """
    server, start = None, time.monotonic()
    if spec.rank_start == 0:
        server = _serve_as_master(spec, cluster, launcher, [*held, listener.fileno()])
    # After the gate, so that the link's first attempt to connect succeeds.
    link = Link(cluster, _introduction(spec, cluster), listener, held)
    plan = _wait_for_plan(link, server, launcher, parent, spec, cluster.heartbeat_timeout)
    agreed, left = plan.agreed, spec.seconds
    peers = LinkedPeers(link, cluster.heartbeat_timeout, by_engine=cluster.by_engine)
    left = None if left is None else max(0.0, left - (time.monotonic() - start))
    nodes = Nodes(agreed.node_rank, agreed.num_nodes, interface=plan.interface)
    joined = dataclasses.replace(_as_agreed(spec, agreed), nodes=nodes).called(time_left=left)
    return Joined(joined, server, peers)


def _as_agreed(spec: LaunchSpec, agreed: Agreed) -> LaunchSpec:
    target = spec.target
    if target is not None:
        target = dataclasses.replace(target, role_start=agreed.role_start, role_size=agreed.role_size)
    return dataclasses.replace(
        spec,
        launch_id=agreed.launch_id,
        secret=f"{spec.secret}/{agreed.secret}",  # the agreed one crosses the network in plain text
        restarts=Restarts(agreed.attempt, spec.restarts.most),
        rank_start=agreed.rank_start,
        world_size=agreed.world_size,
        target=target,
    )


def _serve_as_master(spec: LaunchSpec, cluster: Rendezvous, launcher: AgentsEnd, held: Iterable[int]) -> StoreProcess:
    """Start the process with the gate and the store, at the address where the other machines look for it.

    Raises:
        NoLaunchError: This machine cannot listen there. The launcher has received the reason.
    """
    try:
        public = listen_as_master(cluster.master_ip, cluster.port)
    except OSError as error:
        where = f"master_ip={cluster.master_ip!r}, port={cluster.port}"
        if spec.target is not None:
            where = f"--master-addr {cluster.master_ip}, --master-port {cluster.port}"
        why = f"{error.strerror or error}{_advice(spec, error.errno)}"
        launcher.try_send(Refused(f"this machine cannot be the master at {where}: {why}"))
        raise NoLaunchError from error
    with public:
        gate = GateConfig(public, spec.launch_id, cluster.token, cluster.heartbeat_timeout, cluster.store_limit)
        return StoreProcess(gate, close_in_child=held)


def _advice(spec: LaunchSpec, number: int | None) -> str:
    """Return advice for the error ``number``, if another machine of this launch should be the master; else ""."""
    own = "rank_start" if spec.target is None else f"--node-rank, from 0 to {spec.nodes.count - 1}"
    if number == errno.EADDRINUSE:
        return f". If several machines of this launch run on one host, each must be given its own {own}"
    if number == errno.EADDRNOTAVAIL:
        return f". If the address is another machine's, that is the first: this one must be given its own {own}"
    return ""


def _introduction(spec: LaunchSpec, cluster: Rendezvous) -> Join:
    """Return what this machine tells the gate about itself."""
    # An engine's caller has given all machines the same id; without --rdzv-id, each command makes up one.
    run_id = spec.target.run_id if spec.target is not None and not cluster.by_engine else ""
    from mlaunch.agreed_stop.wire import terms_of  # here: a launch on one machine does not need it

    return Join(
        host=socket.gethostname(),
        rank_start=0 if spec.nodes.guessed else spec.rank_start,
        n_gpus=spec.local_world_size,
        world_size=0 if spec.nodes.guessed else spec.world_size,
        function=spec.call.name,
        mlaunch=__version__.rpartition(".")[0],
        torch=spec.torch_version,
        attempt=spec.restarts.count,
        role="default" if spec.target is None else spec.target.role,
        machine=spec.nodes.rank if spec.nodes.guessed else 0,
        machines=spec.nodes.count if spec.nodes.guessed else 0,
        max_restarts=spec.restarts.most,
        heartbeat_timeout=f"{cluster.heartbeat_timeout:g}",
        timeout="None" if spec.timeout is None else f"{spec.timeout:g}",
        stop_grace=f"{terms_of(spec.sections).grace:g}",
        backend=spec.devices.backend,
        run_id=printable(run_id, 255),
    )


def _wait_for_plan(
    link: Link,
    gate: StoreProcess | None,
    launcher: AgentsEnd,
    parent: int,
    spec: LaunchSpec,
    timeout: float,
) -> Planned:
    sources = [link.channel.fileno(), launcher.fileno(), parent, *([gate.sentinel] if gate is not None else [])]
    # The deadline counts from the call: the wait for machines leaves less of it for the function.
    end = None if spec.seconds is None else time.monotonic() + spec.seconds
    while True:
        left = timeout if end is None else end - time.monotonic()
        ready = wait(sources, max(0.0, min(left, timeout)))
        if not ready and left >= timeout:
            refuse(launcher, f"{_name(link)} {silence(timeout)}")
        if not ready:
            refuse(
                launcher, f"its deadline of {spec.call.deadline:g} s passed while the machines were joining", late=True
            )
        if gate is not None and gate.sentinel in ready:
            who = f"the gate on host {socket.gethostname()} (pid {gate.pid})"
            refuse(launcher, f"{who} {describe_exit(gate.reap())} while the machines were joining")
        if link.channel.fileno() not in ready:  # cancelled, or the launcher or the parent process is gone
            raise NoLaunchError
        match link.channel.hear()[0]:
            case Planned() as planned:
                return planned
            case Waiting() as waiting:
                launcher.try_send(waiting)
            case Refused() | RankFailure() as failure:
                launcher.try_send(failure)
                raise NoLaunchError
            case None:
                refuse(launcher, f"{_name(link)} died while joining")


def _name(link: Link) -> str:
    return f"the link on host {socket.gethostname()} (pid {link.pid})"
