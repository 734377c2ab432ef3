"""The entry of a forked agent: from a launch's order to its ranks and their supervisor.

order --> spec --> meet the other machines, if any --> host the store --> fork the ranks --> supervise --> Finished
  ^                                                                                                          |
  +--------------------------- rest: another launch within 20 ms of this one's end --------------------------+
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from typing import NoReturn

from mlaunch.agent import machine_limits
from mlaunch.agent.fork_ranks import EarlyWatch, ForkContext, fork_ranks
from mlaunch.agent.inspection import Inspection
from mlaunch.agent.leftovers import SharedNames
from mlaunch.agent.one_call import OneCall, PreparedCall, as_prepared
from mlaunch.agent.supervision import Joined, NoLaunchError, Peers, Supervision, refuse
from mlaunch.agent.supervisor import Supervisor
from mlaunch.base import linux
from mlaunch.base.deadline import Deadline
from mlaunch.base.fds import OwnedFds, close_all
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.own_process import is_limit, name_limit, name_process
from mlaunch.base.text import both_ends
from mlaunch.core import load
from mlaunch.protocol import launch_files, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import TEXT_LIMIT, Channel
from mlaunch.protocol.messages import AgentFailed, AgentsEnd, Finished, NamesLeft, RanksStarting, Refused
from mlaunch.protocol.result_queue import Results
from mlaunch.protocol.server_messages import Free, LaunchFds, RestingAgentHears, RestingAgentSays
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rendezvous import store_server
from mlaunch.rendezvous.address import lacks_loopback, listen

_NAMES = 100  # paths, at most, that are sent to the launcher


@frozen_record
class Order:
    """A launch, as the fork server hands it to an agent, which owns the descriptors."""

    fds: LaunchFds
    call: Call | None = None  # it is in memory
    held: tuple[int, ...] = ()  # descriptors, which the ranks hold, too


@frozen_record
class Home:
    """The surroundings of an agent, which are the same for all launches that it serves."""

    server: int  # the fork server's pid
    foreign: OwnedFds  # the fork server's own descriptors, and other launches', which the agent closes
    link: Channel[RestingAgentHears, RestingAgentSays] | None  # to the fork server, which may have more launches


def run_agent(order: Order, home: Home) -> NoReturn:
    """Run an agent in a forked process, and end the process."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Whatever ranks start and leave falls to this process, which ends it before the launch is over.
        linux.adopt_orphans()
        # If the fork server dies while this process is stopped, it sees that when it continues, and ends its ranks.
        linux.wake_with(home.server)
        home.foreign.close_in_child()
        parent, wanted = os.pidfd_open(home.server), order
        # One launch after another, as long as each ends well and the fork server has more.
        while _serve(wanted, home.link, parent) and home.link is not None:
            if (following := _rest(home.link, parent)) is None:
                break
            wanted = following
        code = 0
    finally:
        os._exit(code)


def _serve(order: Order, link: Channel[RestingAgentHears, RestingAgentSays] | None, parent: int) -> bool:
    """Serve a launch; return True if this process is free for another, as it has told the fork server on ``link``."""
    launcher: AgentsEnd = Channel.adopt(order.fds.socket)
    try:
        for fd, standard in ((order.fds.stdout, 1), (order.fds.stderr, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        wanted: LaunchSpec = payload.read(order.fds.spec)
        if order.fds.call is None:
            wanted = as_prepared(wanted)
        with launch_files.with_error_directory(wanted) as spec:
            is_free = _supervise(order, spec, launcher, link, parent)
    except NoLaunchError:
        linux.kill_children()
        os._exit(0)  # while the error holds what was opened: a ResourceWarning would trouble the caller
    except BaseException as error:
        name_limit(error)
        told = f"{type(error).__name__}: {error}" if is_limit(error) else traceback.format_exc()
        launcher.try_send(AgentFailed(both_ends(told, TEXT_LIMIT)))
        os._exit(1)
    launcher.close()
    return is_free


def _rest(link: Channel[RestingAgentHears, RestingAgentSays], parent: int) -> Order | None:
    """Let go of everything of the last launch, and wait for the next one; None: there will be none."""
    # A process that hosts a thread and then forks can leave the child waiting for a lock of that thread's.
    store_server.let_go()
    _to_null(1, 2)
    os.chdir("/")  # nor does it keep a file system busy
    if link.fileno() not in linux.wait_readable([link.fileno(), parent]):
        return None
    try:
        following, fds = link.receive()
    except EOFError:
        return None
    own, held = LaunchFds.of(fds, prepares=following.prepares)
    return Order(own, None, tuple(held))


def _to_null(*standard: int) -> None:
    """Put /dev/null in place of these streams."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in standard:
        os.dup2(null, fd)
    os.close(null)


def _supervise(
    order: Order,
    spec: LaunchSpec,
    launcher: AgentsEnd,
    link: Channel[RestingAgentHears, RestingAgentSays] | None,
    parent: int,
) -> bool:
    """Run a launch; return True if it has ended as it should, with nothing of it left here."""
    os.close(order.fds.spec)
    name_process("agent", spec.call.name)
    with contextlib.suppress(OSError):  # which a rank will tell
        os.chdir(spec.context.cwd)  # where hooks of the user's expect to run that follow a fork
    if spec.target is None:  # a command reads what its terminal or pipe gives, as under torchrun
        _to_null(0)
    listener = _listen(spec, launcher)
    owned = _owned(order, link, parent)
    joined = _join(spec, listener, launcher, parent, owned)
    spec = joined.spec
    results = Results(spec.local_world_size, stay=spec.stays)
    agreed = (spec.launch_id, spec.rank_start, spec.world_size)
    launcher.try_send(RanksStarting(time.monotonic(), *agreed, os.getpid()), results.offered())
    results.close_offered()
    owned.add(listener.fileno())
    names = SharedNames()
    watch = EarlyWatch(launcher, parent, owned, Deadline().start(spec.seconds, time.monotonic()))
    ranks = fork_ranks(ForkContext(spec, listener.getsockname()[:2], results, order.call, owned, watch), launcher)
    if spec.cluster is None:
        store_server.host(listener)  # after the last fork (see _rest); its socket listens already
    listener.close()
    inspection = Inspection(spec, ranks, results.board, time.monotonic)
    scene = Supervision(
        ranks, results, joined.server, launcher, parent, spec.grace_period, inspection, joined.peers,
        sections=spec.sections, callers_signals=spec.callers_signals, said=watch.said,
    )  # fmt: skip
    supervisor = _begin(order, spec, scene, watch.deadline)
    went_well = _run(supervisor, spec, inspection, names, launcher)
    # Ranks are reaped and have left nothing, so the next call need not wait for our exit, unless this process holds a
    # file or port that it needs: that takes as long as unmapping torch does, a tenth of a call of 2 ranks.
    may_report_end = spec.target is None and spec.cluster is None and spec.port == 0
    if not may_report_end or linux.wait_readable([parent], 0.0):  # then the launcher is to hear of that
        return False
    if went_well and link is not None:
        link.try_send(Free())  # before the launcher can ask for another
    launcher.try_send(Finished())
    # Nothing is left on the devices, and the end of a process takes a while.
    close_all([*order.held, *supervisor.launch.held])
    results.close()
    return went_well


def _join(spec: LaunchSpec, listener: socket.socket, launcher: AgentsEnd, parent: int, owned: OwnedFds) -> Joined:
    """Join the other machines, if there are any and this one has room for its ranks."""
    if lacks := machine_limits.lacks(spec.local_world_size, script=spec.target is not None):
        refuse(launcher, lacks)
    if spec.cluster is None:
        return Joined(spec, None, Peers())
    # Before ranks are forked: their environment depends on what the machines agree on.
    joined: Joined = load.module_of("machines", "agent").join_machines(
        spec, spec.cluster, listener, launcher, parent, owned
    )
    owned.add(*joined.peers.fds())
    return joined


def _run(
    supervisor: Supervisor, spec: LaunchSpec, inspection: Inspection, names: SharedNames, launcher: AgentsEnd
) -> bool:
    """Run the launch until its last process has ended; tell the launcher which files nobody removes any more."""
    try:
        went_well = supervisor.run()
    finally:
        inspection.close()
        launch_files.remove_temporary(spec)
    paths, size = names.left()
    if paths:
        launcher.try_send(NamesLeft(tuple(paths[:_NAMES]), size, socket.gethostname()))
    return went_well


def _owned(order: Order, link: Channel[RestingAgentHears, RestingAgentSays] | None, parent: int) -> OwnedFds:
    """Return the descriptors that the ranks must not hold."""
    call = [] if order.fds.call is None else [order.fds.call]
    return OwnedFds(parent, order.fds.socket, *call, *([] if link is None else [link.fileno()]))


def _begin(order: Order, spec: LaunchSpec, scene: Supervision, deadline: Deadline) -> Supervisor:
    """Return the supervisor, which has begun the call if that is there already."""
    call_fd = order.fds.call
    if call_fd is None:  # the launch is prepared
        return Supervisor(scene, PreparedCall)
    if spec.stays:
        os.close(call_fd)
        return Supervisor(scene, load.module_of("ranks", "agent").calls_of(spec))
    supervisor = Supervisor(scene, OneCall)
    supervisor.launch.begin_only_call(call_fd if order.call is None else None, spec.call.deadline, deadline)
    os.close(call_fd)
    return supervisor


def _listen(spec: LaunchSpec, launcher: AgentsEnd) -> socket.socket:
    """Open the socket where the ranks find the store."""
    if lacks := lacks_loopback():  # else gloo tells of it for each rank, after half an hour
        refuse(launcher, lacks)
    port = spec.port if spec.cluster is None else 0
    try:
        return listen(port=port)
    except OSError as error:
        why = f"{os.strerror(error.errno or 0)}; give another port, or none for any that is free"
        launcher.try_send(Refused(f"the rendezvous cannot listen at 127.0.0.1, port {port}: {why}"))
        raise NoLaunchError from error
