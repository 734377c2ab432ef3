"""From a launch's order to its agent and ranks: what happens between the forks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mlaunch.agent.inspection import Inspection
from mlaunch.agent.peers import Company, NoLaunchError, Others, come_together
from mlaunch.agent.ranks import RankProcess
from mlaunch.agent.supervisor import Agent, Limits, Scene
from mlaunch.base import linux
from mlaunch.protocol import error_file, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentFailed, RanksStarting, RankStarted, Refused
from mlaunch.protocol.results import Answers
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import function
from mlaunch.rendezvous.address import listen
from mlaunch.rendezvous.store import HostedServer

_TEXT_LIMIT = 16_384  # characters: a record is small


@dataclass(frozen=True)
class Order:
    """What the fork server hands to an agent: the launch's file descriptors, and those that are not its business."""

    spec_fd: int
    call_fd: int
    launcher_fd: int
    stdout: int
    stderr: int
    parent: int  # the fork server's pid
    foreign: Sequence[int]  # the fork server's own fds, and other launches'
    call: Call | None


def run_agent(order: Order) -> NoReturn:
    """Lives an agent's life in a forked process."""
    code = 1
    launcher = Channel.adopt(order.launcher_fd)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        linux.adopt_orphans()
        for fd in order.foreign:
            os.close(fd)
        _take_over_streams(order)
        with error_file.with_directory(payload.read(order.spec_fd)) as spec:
            _supervise(order, spec, launcher)
        code = 0
    except NoLaunchError:
        linux.kill_children()
        code = 0
    except BaseException:
        launcher.tell(AgentFailed(traceback.format_exc()[-_TEXT_LIMIT:]))
    finally:
        os._exit(code)


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
    if spec.command is None:  # a command reads what its terminal or pipe gives, as under torchrun
        _silence_input()
    parent = os.pidfd_open(order.parent)
    listener = _listen(spec, launcher)
    ours = [parent, order.launcher_fd]
    company = Company(spec, None, Others())
    if spec.cluster is not None:
        company = come_together(spec, spec.cluster, listener, launcher, parent, [*ours, order.call_fd])
        ours += company.others.fds()
    answers = Answers(spec.local_size)
    launcher.tell(RanksStarting(time.monotonic()), [answers.board.fd])
    ranks = _start_ranks(order, company.spec, listener, launcher, answers, ours)
    server = company.server
    if spec.cluster is None:
        # After the ranks: they can already connect, since the socket listens, and have work to do until they need it.
        server = HostedServer(listener, close_in_child=[*ours, order.call_fd])
    listener.close()
    os.close(order.call_fd)
    inspection = Inspection(company.spec, ranks, answers.board, time.monotonic)
    limits, scene = Limits(spec.grace_period, company.spec.deadline), Scene(inspection, company.others)
    try:
        Agent(ranks, answers, server, launcher, parent, limits=limits, scene=scene).run()
    finally:
        inspection.close()


def _listen(spec: LaunchSpec, launcher: Channel) -> socket.socket:
    """Where the ranks find the store."""
    port = spec.port if spec.cluster is None else 0
    try:
        return listen(port=port)
    except OSError as error:
        why = f"{os.strerror(error.errno or 0)}; give another port, or none for any that is free"
        launcher.tell(Refused(f"the rendezvous cannot listen at 127.0.0.1, port {port}: {why}"))
        raise NoLaunchError from error


def _start_ranks(
    order: Order, spec: LaunchSpec, listener: socket.socket, launcher: Channel, answers: Answers, ours: list[int]
) -> list[RankProcess]:
    """Forks them. ``ours``: fds that are not their business; grows by what is known of each."""
    ranks: list[RankProcess] = []
    for local_rank in range(spec.local_size):
        stacks_in, stacks_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        streams = {stream: os.pipe2(os.O_CLOEXEC) for stream in spec.streams(local_rank)}
        place = function.Place(
            spec=spec,
            local_rank=local_rank,
            rendezvous=listener.getsockname()[:2],
            stack_fd=stacks_out,
            answers=answers,
            call_fd=order.call_fd,
            memfd=payload.create(f"rank-{spec.rank(local_rank)}"),
            crash_fd=payload.create(f"crash-{spec.rank(local_rank)}"),
            call=order.call,
        )
        readers = [reader for reader, _ in streams.values()]
        ranks.append(_start_rank(place, [*ours, listener.fileno(), stacks_in, *readers], stacks_in, streams))
        launcher.tell(RankStarted(ranks[-1].rank, ranks[-1].pid, time.monotonic()), readers)
        for fd in (stacks_out, *readers, *(writer for _, writer in streams.values())):
            os.close(fd)
        ours += [ranks[-1].pidfd, place.memfd, place.crash_fd, stacks_in]
    return ranks


def _start_rank(
    place: function.Place, ours: Sequence[int], stacks_in: int, streams: Mapping[int, tuple[int, int]]
) -> RankProcess:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            linux.die_with(parent)
            os.setpgid(0, 0)
            for fd in ours:
                os.close(fd)
            for stream, (_, writer) in streams.items():
                os.dup2(writer, stream)
                os.close(writer)
            place.answers.queue.close_reader()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        function.run(place)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # both set it: whoever is first
        os.setpgid(pid, pid)
    rank = place.spec.rank(place.local_rank)
    return RankProcess(
        rank=rank,
        local_rank=place.local_rank,
        pid=pid,
        pidfd=os.pidfd_open(pid),
        memfd=place.memfd,
        crash_fd=place.crash_fd,
        stack_fd=stacks_in,
        error_file=error_file.path_of(place.spec, place.local_rank),
    )
