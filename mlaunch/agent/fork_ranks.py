"""Forks the ranks of a launch."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from mlaunch.agent.ranks import RankProcess
from mlaunch.base import linux
from mlaunch.base.fds import OwnedFds
from mlaunch.protocol import error_file, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import RankStarted
from mlaunch.protocol.results import Results
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import main as rank_main
from mlaunch.rank.base import RankArgs


@dataclass(frozen=True)
class Nursery:
    """What forking needs besides the rank's number. ``owned``: descriptors that are not the ranks' business."""

    spec: LaunchSpec
    rendezvous: tuple[str, int]
    results: Results
    inherited: Call | None
    owned: OwnedFds


def fork_ranks(nursery: Nursery, launcher: Channel) -> list[RankProcess]:
    """Forks all ranks of this machine, then tells the launcher of them: the last rank need not wait for that."""
    forked = [_prepare_and_fork(nursery, local_rank) for local_rank in range(nursery.spec.local_world_size)]
    for rank, started, readers in forked:
        if nursery.spec.stays:
            rank.give_answer_file()  # before the launcher, which hears of the rank now, can send it a call by itself
        launcher.try_send(started, [*([rank.channel.fileno()] if nursery.spec.stays else []), *readers])
        nursery.owned.close(*readers)
    return [rank for rank, _, _ in forked]


def _prepare_and_fork(nursery: Nursery, local_rank: int) -> tuple[RankProcess, RankStarted, list[int]]:
    """Returns also what the launcher is to be told, with the reading ends of the rank's streams."""
    spec, owned = nursery.spec, nursery.owned
    stacks_in, stacks_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    streams = {stream: os.pipe2(os.O_CLOEXEC) for stream in spec.streams(local_rank)}
    channel, theirs = Channel.pair()
    aside, theirs_aside = Channel.pair() if spec.stays else (None, None)
    args = RankArgs(
        spec=spec,
        local_rank=local_rank,
        rendezvous=nursery.rendezvous,
        results=nursery.results,
        channel=theirs,
        crash_fd=payload.create(f"crash-{spec.rank(local_rank)}"),
        stack_fd=stacks_out,
        aside=theirs_aside,
        inherited=nursery.inherited,
    )
    readers = [reader for reader, _ in streams.values()]
    owned.add(stacks_in, channel.fileno(), *([aside.fileno()] if aside is not None else []), *readers)
    pid = _fork(args, owned, {stream: writer for stream, (_, writer) in streams.items()})
    started = RankStarted(spec.rank(local_rank), pid, time.monotonic())
    theirs.close()
    if theirs_aside is not None:
        theirs_aside.close()
    for fd in (stacks_out, *(writer for _, writer in streams.values())):
        os.close(fd)
    rank = RankProcess(
        rank=spec.rank(local_rank),
        local_rank=local_rank,
        pid=pid,
        pidfd=os.pidfd_open(pid),
        channel=channel,
        crash_fd=args.crash_fd,
        stack_fd=stacks_in,
        aside=aside,
        error_file=error_file.path_of(spec, local_rank),
    )
    owned.add(rank.pidfd, rank.crash_fd)
    return rank, started, readers


def _fork(args: RankArgs, owned: OwnedFds, streams: Mapping[int, int]) -> int:
    """Forks one rank; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            linux.die_with(parent)
            os.setpgid(0, 0)
            owned.close_in_child()
            for stream, writer in streams.items():
                os.dup2(writer, stream)
                os.close(writer)
            args.results.queue.close_reader()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        rank_main.run(args)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # both set it: whoever is first
        os.setpgid(pid, pid)
    return pid
