"""The agent's part in a launch over several machines: it joins them, and tells them how its ranks end.

It starts two processes: the link, which talks to the other machines, and for rank 0 the gate, where all links meet.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import time
import traceback
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from typing import NoReturn

from mlaunch._version import __version__
from mlaunch.agent.supervision import Joined, NoLaunchError, Peers, refuse
from mlaunch.base.deadline import NEVER
from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.base.text import printable
from mlaunch.machines.gate import GateConfig, GateProcess, prepare_process, run_in_loop
from mlaunch.machines.wire import AllGone, Beat, Done, Join, LinkHears, LinkSays, Planned, shortened
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import AgentsEnd, ForPart, PartSays, Refused, Waiting
from mlaunch.protocol.spec import Agreed, LaunchSpec, Nodes, Rendezvous, Restarts
from mlaunch.rendezvous.address import listen_as_master

_LINK = "the process that talks to the other machines"  # as messages call it


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


def _serve_as_master(spec: LaunchSpec, cluster: Rendezvous, launcher: AgentsEnd, held: Iterable[int]) -> GateProcess:
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
        # Python's own words repeat the address.
        words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        why = f"{words}{_advice(spec, error.errno)}"
        launcher.try_send(Refused(f"this machine cannot be the master at {where}: {why}"))
        raise NoLaunchError from error
    with public:
        gate = GateConfig(public, spec.launch_id, cluster.token, cluster.heartbeat_timeout, cluster.store_limit)
        return GateProcess(gate, close_in_child=held)


def _advice(spec: LaunchSpec, number: int | None) -> str:
    """Return advice for the error ``number``, if another machine of this launch should be the master; else ""."""
    own = "rank_start" if spec.target is None else f"--node-rank, from 0 to {spec.nodes.count - 1}"
    if number == errno.EADDRINUSE:
        return f". If several machines of this launch run on one host, give each its own {own}"
    if number == errno.EADDRNOTAVAIL:
        return f". If the address is another machine's, that machine is the first: give this one its own {own}"
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
    gate: GateProcess | None,
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


class LinkedPeers(Peers):
    """The other machines of a launch, which the agent reaches by its link, a process.

    ``timeout``: seconds after which a silent link counts as lost, and is killed.
    """

    def __init__(self, link: Link, timeout: float = 0.0, *, by_engine: bool = False) -> None:
        self._link, self.alone = link, False
        self.agree = not by_engine
        self.pids = [link.pid]
        self._timeout = timeout
        self._heard_at = time.monotonic()
        self._over, self._told = False, False
        self._finished = False

    def fds(self) -> list[int]:
        return [] if self._over else [self._link.channel.fileno()]

    def due(self) -> float:
        """Return when a link that stays silent counts as lost, in monotonic seconds."""
        return self._heard_at + self._timeout if self.fds() else NEVER

    def hear(self, ready: Collection[int]) -> RankFailure | ForPart | None:
        """Read from the link; return a failure of another machine, a record for a feature's part, or None.

        A link that is silent for too long is a failure, too, and so is one that dies before any other failure.
        """
        if self._over:
            return None
        if self._link.channel.fileno() not in ready:
            return self._miss(self._link)
        # Any record counts: the link's heartbeat is for times when it has nothing else to send.
        self._heard_at = time.monotonic()
        try:
            record, _ = self._link.channel.receive()
        except EOFError:
            self._over = True
            if self._told:  # after a failure the link has nothing more to do
                return None
            return RankFailure(None, self._link.pid, "died", subject=_LINK, kind="lost")
        match record:
            case AllGone():
                self._over = True
            case RankFailure() | ForPart():
                self._told = self._told or isinstance(record, RankFailure)
                return record
            case Beat() | Waiting() | Planned() | Refused():  # from before the launch began
                pass
            case _:
                assert_never(record)
        return None

    def say(self, record: PartSays) -> None:
        """Send a record of a feature's part to the other machines."""
        self._link.channel.try_send(record)

    def _miss(self, link: Link) -> RankFailure | None:
        """Kill a link that has said nothing for too long (somebody has stopped it); return the failure, or None."""
        if time.monotonic() < self._heard_at + self._timeout:
            return None
        self._over = True
        os.kill(link.pid, signal.SIGKILL)  # our child, not reaped yet: no other process has its pid
        return RankFailure(None, link.pid, silence(self._timeout), subject=_LINK, kind="lost")

    def tell(self, failure: RankFailure) -> None:
        """Send a failure to the other machines if it is the first; later ones go only to this machine's caller."""
        if not self._told:
            self._told = True
            self._link.channel.try_send(shortened(failure))

    def finish(self) -> None:
        """Tell the other machines, once, that this machine's ranks are gone."""
        if not self._finished:
            self._finished = True
            self._link.channel.try_send(Done())

    @property
    def awaited(self) -> bool:
        """True if ranks of other machines may still run."""
        return not self._over


def silence(seconds: float) -> str:
    """Return the end of a sentence about a link that was killed after so many seconds of silence."""
    return f"said nothing for {seconds:g} s (was it stopped?) and was killed"


class Link:
    """The link, a forked process that ends with this one, and a channel to it.

    ``listener``: the socket where the link accepts connections of this machine's ranks.
    """

    def __init__(
        self, cluster: Rendezvous, join: Join, listener: socket.socket, close_in_child: Iterable[int] = ()
    ) -> None:
        self.channel: Channel[LinkSays, LinkHears]
        self.channel, theirs = Channel.pair()
        parent = os.getpid()
        # A process beside the agent: heartbeats continue while the agent, which has no event loop, is busy with ranks.
        self.pid = os.fork()
        if self.pid == 0:
            self.channel.close()
            _run_link(cluster, join, theirs, listener, parent, close_in_child)
        theirs.close()


def _run_link(
    cluster: Rendezvous,
    join: Join,
    agent: Channel[LinkHears, LinkSays],
    listener: socket.socket,
    parent: int,
    close: Iterable[int],
) -> NoReturn:
    try:
        prepare_process(parent, close, "link")
        from mlaunch.machines.link import LinkProcess

        run_in_loop(LinkProcess(cluster, join, agent).run(listener))
    except BaseException:  # a bug in mlaunch: its traceback must not be lost
        traceback.print_exc()
    finally:
        os._exit(1)
