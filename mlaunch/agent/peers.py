"""How an agent deals with its launch's other machines: joins them, shares the first failure, ends with them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait

from mlaunch._version import __version__
from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.machine_messages import AllGone, Beat, Done, Planned, Refused, Value, Waiting
from mlaunch.protocol.messages.stop_messages import AskAll, RanksFrozen, StopOrder
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.spec import Agreed, LaunchSpec, Rendezvous
from mlaunch.rendezvous.address import listen_as_master
from mlaunch.rendezvous.gate.membership import Join, shortened
from mlaunch.rendezvous.link.link_handle import Link
from mlaunch.rendezvous.store_process import GateConfig, StoreProcess


class NoLaunchError(Exception):
    """The machines did not come together; the launcher has been told."""


class Peers:
    """The launch's other machines. ``link`` None: there are none, and nothing is told or awaited.

    ``timeout``: seconds after which a link that does not say a word counts as lost, and is killed.
    """

    def __init__(
        self, link: Link | None = None, timeout: float = 0.0, *, gather_all: bool = False, by_engine: bool = False
    ) -> None:
        self._link = link
        self.agree = link is not None and not by_engine  # on a step at which all stop
        self._orders: list[StopOrder] = []
        self._timeout = timeout
        self._heard_at = time.monotonic()
        self._over, self._told = link is None, False
        self._finished = False
        self._gather_all = gather_all

    def fds(self) -> list[int]:
        return [] if self._link is None or self._over else [self._link.channel.fileno()]

    def due(self) -> float | None:
        """Returns when the link will count as lost, in monotonic seconds."""
        return self._heard_at + self._timeout if self.fds() else None

    def keep(self, rank: int, value: Payload | None) -> None:
        """Hands on what a rank of ours returned (None: nothing), if the others want it."""
        if self._link is None or not self._gather_all:
            return
        with contextlib.ExitStack() as stack:
            memfds = [] if value is None else [stack.enter_context(payload.in_memfd(value))]
            self._link.channel.try_send(Value(rank), memfds)

    def hear(self, ready: Collection[int], launcher: Channel) -> RankFailure | None:
        """Returns the first failure of another machine, if that is the news. Passes values on to the launcher."""
        if self._link is None or self._over:
            return None
        if self._link.channel.fileno() not in ready:
            return self._miss(self._link)
        self._heard_at = time.monotonic()
        try:
            record, fds = self._link.channel.receive()
        except EOFError:
            self._over = True
            if self._told:  # after a failure it has nothing more to do
                return None
            return RankFailure(None, self._link.pid, "died", subject="the link to the other machines")
        if isinstance(record, AllGone):
            self._over = True
        if isinstance(record, Value):
            launcher.try_send(record, fds)
            for fd in fds:
                os.close(fd)
        if isinstance(record, StopOrder):
            self._orders.append(record)
        if isinstance(record, RankFailure):
            self._told = True
            return record
        return None

    def take_orders(self) -> list[StopOrder]:
        """Returns what has come of a stop that all machines agree on, once."""
        orders, self._orders = self._orders, []
        return orders

    def say(self, record: AskAll | RanksFrozen) -> None:
        """Says a word about such a stop."""
        if self._link is not None:
            self._link.channel.try_send(record)

    def _miss(self, link: Link) -> RankFailure | None:
        """Gives a link up that somebody has stopped."""
        if time.monotonic() < self._heard_at + self._timeout:
            return None
        self._over = True
        os.kill(link.pid, signal.SIGKILL)  # it is our child and not reaped, so the number is its own
        return RankFailure(None, link.pid, _silence(self._timeout), subject="the link to the other machines")

    def tell(self, failure: RankFailure) -> None:
        """Tells them of the first failure here; of those that follow only our own caller hears."""
        if self._link is not None and not self._told:
            self._told = True
            self._link.channel.try_send(shortened(failure))

    def finish(self) -> None:
        """Tells them that this machine's ranks are gone."""
        if self._link is not None and not self._finished:
            self._finished = True
            self._link.channel.try_send(Done())

    @property
    def awaited(self) -> bool:
        """Whether some have not finished."""
        return not self._over


@dataclasses.dataclass
class Joined:
    """What came of joining."""

    spec: LaunchSpec
    server: StoreProcess | None
    peers: Peers


def join_machines(
    spec: LaunchSpec, cluster: Rendezvous, listener: socket.socket, launcher: Channel, parent: int, held: Iterable[int]
) -> Joined:
    """Joins the launch's other machines; returns once all are there. ``held``: fds that are not the link's business.

    Raises:
        NoLaunchError: They will not come together, or the launcher does not want it any more.
    """
    server, start = None, time.monotonic()
    if spec.rank_start == 0:
        server = _serve_as_master(spec, cluster, launcher, [*held, listener.fileno()])
    link = Link(cluster, _introduction(spec), listener, held)
    plan = _wait_for_plan(link, server, launcher, parent, spec, cluster.heartbeat_timeout)
    left = spec.seconds
    peers = Peers(link, cluster.heartbeat_timeout, gather_all=spec.gather_all, by_engine=cluster.by_engine)
    joined = dataclasses.replace(
        _as_agreed(spec, plan.agreed),
        interface=plan.interface,
        time_left=None if left is None else max(0.0, left - (time.monotonic() - start)),
    )
    return Joined(joined, server, peers)


def _as_agreed(spec: LaunchSpec, agreed: Agreed) -> LaunchSpec:
    command = spec.command
    if command is not None:
        command = dataclasses.replace(command, role_start=agreed.role_start, role_size=agreed.role_size)
    return dataclasses.replace(
        spec,
        launch_id=agreed.launch_id,
        secret=f"{spec.secret}/{agreed.secret}",  # the latter can be read on its way, the token cannot
        restart_count=agreed.attempt,
        node_rank=agreed.node_rank,
        num_nodes=agreed.num_nodes,
        rank_start=agreed.rank_start,
        world_size=agreed.world_size,
        command=command,
    )


def _serve_as_master(spec: LaunchSpec, cluster: Rendezvous, launcher: Channel, held: Iterable[int]) -> StoreProcess:
    """Starts the gate, where the others find it, and with it the store."""
    try:
        public = listen_as_master(cluster.master_ip, cluster.port)
    except OSError as error:
        where = f"master_ip={cluster.master_ip!r}, port={cluster.port}"
        why = f"{error.strerror or error}{_advice(spec) if error.errno == errno.EADDRINUSE else ''}"
        launcher.try_send(Refused(f"this machine cannot be the master at {where}: {why}"))
        raise NoLaunchError from error
    with public:
        gate = GateConfig(public, spec.launch_id, cluster.token, cluster.heartbeat_timeout)
        return StoreProcess(gate, close_in_child=held)


def _advice(spec: LaunchSpec) -> str:
    """Says what to give if it is the launch's own first machine that has the address."""
    number = "rank_start" if spec.command is None else f"--node-rank, from 0 to {spec.num_nodes - 1}"
    return f". If several machines of this launch run on one host, each must be given its own {number}"


def _introduction(spec: LaunchSpec) -> Join:
    """Says what this machine is."""
    return Join(
        host=socket.gethostname(),
        rank_start=0 if spec.count_machines else spec.rank_start,
        n_gpus=spec.local_world_size,
        world_size=0 if spec.count_machines else spec.world_size,
        function=spec.name,
        mlaunch=__version__.rpartition(".")[0],
        torch=spec.torch_version,
        gather="all" if spec.gather_all else "local",
        attempt=spec.restart_count,
        role="default" if spec.command is None else spec.command.role,
        machine=spec.node_rank if spec.count_machines else 0,
        machines=spec.num_nodes if spec.count_machines else 0,
    )


def _silence(seconds: float) -> str:
    return f"said nothing for {seconds:g} s (was it stopped?) and was killed"


def _wait_for_plan(
    link: Link, gate: StoreProcess | None, launcher: Channel, parent: int, spec: LaunchSpec, timeout: float
) -> Planned:
    sources = [link.channel.fileno(), launcher.fileno(), parent, *([gate.sentinel] if gate is not None else [])]
    end = None if spec.seconds is None else time.monotonic() + spec.seconds
    while True:
        left = timeout if end is None else end - time.monotonic()
        ready = wait(sources, max(0.0, min(left, timeout)))
        if not ready and left >= timeout:
            launcher.try_send(Refused(f"{_name(link)} {_silence(timeout)}"))
            raise NoLaunchError
        if not ready:
            why = f"its deadline of {spec.deadline:g} s passed while the machines were joining"
            launcher.try_send(Refused(why, late=True))
            raise NoLaunchError
        if gate is not None and gate.sentinel in ready:
            who = f"the gate on host {socket.gethostname()} (pid {gate.pid})"
            launcher.try_send(Refused(f"{who} {describe_exit(gate.reap())} while the machines were joining"))
            raise NoLaunchError
        if link.channel.fileno() not in ready:  # cancelled, or nobody is left who wants it
            raise NoLaunchError
        record = _heard(link.channel)
        if isinstance(record, Planned):
            return record
        if isinstance(record, Beat):
            continue
        launcher.try_send(record if record is not None else Refused(f"{_name(link)} died while joining"))
        if not isinstance(record, Waiting):
            raise NoLaunchError


def _name(link: Link) -> str:
    return f"the link on host {socket.gethostname()} (pid {link.pid})"


def _heard(channel: Channel) -> object:
    """Returns what the channel brought; None at its end."""
    try:
        return channel.receive()[0]
    except EOFError:
        return None
