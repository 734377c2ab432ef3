"""The entry of a forked agent: from a launch's order to its ranks and their supervisor."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

from mlaunch.agent.fork_ranks import Nursery, fork_ranks
from mlaunch.agent.inspection import Inspection
from mlaunch.agent.kept import KeptSupervisor
from mlaunch.agent.kept_part import KeptPartSupervisor
from mlaunch.agent.peers import Joined, NoLaunchError, Peers, join_machines
from mlaunch.agent.prepared import PreparedSupervisor, as_prepared, lower_priority
from mlaunch.agent.supervision import Supervision
from mlaunch.agent.supervisor import Supervisor
from mlaunch.base import linux, rlimits
from mlaunch.base.fds import OwnedFds
from mlaunch.base.text import last_bytes
from mlaunch.protocol import error_file, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import TEXT_LIMIT, Channel
from mlaunch.protocol.machine_messages import Refused
from mlaunch.protocol.messages import AgentFailed, Finished, RanksStarting
from mlaunch.protocol.results import Results
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rendezvous import names
from mlaunch.rendezvous.address import listen
from mlaunch.rendezvous.tcp_store import serve

# The store, whose destructor would wait for its thread; the end of the process takes it anyway.
_until_exit: list[object] = []


@dataclass(frozen=True)
class Order:
    """What the fork server hands to an agent: the launch's file descriptors, and its own, which the agent closes."""

    spec_fd: int
    call_fd: int  # -1: the launch is to be prepared
    launcher_fd: int
    stdout: int
    stderr: int
    parent: int  # the fork server's pid
    foreign: OwnedFds  # the fork server's own fds, and other launches'
    call: Call | None
    rehearses: bool = False  # if it is to be prepared


def run_agent(order: Order) -> NoReturn:
    """Lives an agent's life in a forked process."""
    code = 1
    launcher = Channel.adopt(order.launcher_fd)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        linux.adopt_orphans()
        linux.wake_with(order.parent)
        order.foreign.close_in_child()
        _take_over_streams(order)
        with error_file.with_directory(_wanted(order)) as spec:
            _supervise(order, spec, launcher)
        code = 0
    except NoLaunchError:
        linux.kill_children()
        os._exit(0)  # while the error holds what was opened: a ResourceWarning would trouble the caller
    except BaseException as error:
        rlimits.name_limit(error)
        launcher.try_send(AgentFailed(last_bytes(traceback.format_exc(), TEXT_LIMIT)))
    finally:
        os._exit(code)


def _wanted(order: Order) -> LaunchSpec:
    """Returns the launch that is to be made."""
    spec: LaunchSpec = payload.read(order.spec_fd)
    return as_prepared(spec, rehearses=order.rehearses) if order.call_fd < 0 else spec


def _take_over_streams(order: Order) -> None:
    for fd, standard in ((order.stdout, 1), (order.stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)


def _silence_input() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _supervise(order: Order, spec: LaunchSpec, launcher: Channel) -> None:
    os.close(order.spec_fd)
    priority = lower_priority() if spec.prepared else None
    if spec.command is None:  # a command reads what its terminal or pipe gives, as under torchrun
        _silence_input()
    parent = os.pidfd_open(order.parent)
    listener = _listen(spec, launcher)
    owned = OwnedFds(parent, order.launcher_fd, *([] if spec.prepared else [order.call_fd]))
    joined = Joined(spec, None, Peers())
    if spec.cluster is not None:
        joined = join_machines(spec, spec.cluster, listener, launcher, parent, owned)
        owned.add(*joined.peers.fds())
    spec = joined.spec
    results = Results(spec.local_world_size, stay=spec.stays)
    agreed = (spec.launch_id, spec.rank_start, spec.world_size)
    launcher.try_send(RanksStarting(time.monotonic(), *agreed), results.offered())
    results.close_offered()
    owned.add(listener.fileno())
    ranks = fork_ranks(Nursery(spec, listener.getsockname()[:2], results, order.call, owned), launcher)
    if spec.cluster is None:
        _host_store(listener)
    listener.close()
    inspection = Inspection(spec, ranks, results.board, time.monotonic)
    scene = Supervision(ranks, results, joined.server, launcher, parent, spec.grace_period, inspection, joined.peers)
    supervisor = _begin(order, spec, scene, priority)
    try:
        supervisor.run()
    finally:
        inspection.close()
    if _may_say_so(spec) and not linux.wait_readable([parent], 0.0):  # else the launcher has that to hear
        launcher.try_send(Finished())


def _begin(order: Order, spec: LaunchSpec, scene: Supervision, priority: int | None) -> Supervisor:
    """Returns the supervisor, which has begun the call if that is there already."""
    if spec.prepared:
        return PreparedSupervisor(scene, priority, rehearses=spec.rehearses)
    if spec.stays:
        os.close(order.call_fd)
        return KeptSupervisor(scene) if spec.cluster is None else KeptPartSupervisor(scene)
    supervisor = Supervisor(scene)
    supervisor.begin_call(order.call_fd if order.call is None else None, spec.deadline, spec.seconds)
    os.close(order.call_fd)
    return supervisor


def _may_say_so(spec: LaunchSpec) -> bool:
    """Tells whether nothing goes with this process that the next call may want: files, a port."""
    return spec.command is None and spec.cluster is None and spec.port == 0


def _host_store(listener: socket.socket) -> None:
    """Hosts the store of a launch on one machine in this process, which forks nothing any more.

    The ranks can already connect, since the socket listens, and have work to do until they need it. In a launch over
    several machines the gate's process has the store, since machines join before ranks are forked.
    """
    names.look_up_in_files_only()  # this process knows nobody but by address
    _until_exit.append(serve(listener.dup()))


def _listen(spec: LaunchSpec, launcher: Channel) -> socket.socket:
    """Opens the socket where the ranks find the store."""
    port = spec.port if spec.cluster is None else 0
    try:
        return listen(port=port)
    except OSError as error:
        why = f"{os.strerror(error.errno or 0)}; give another port, or none for any that is free"
        launcher.try_send(Refused(f"the rendezvous cannot listen at 127.0.0.1, port {port}: {why}"))
        raise NoLaunchError from error
