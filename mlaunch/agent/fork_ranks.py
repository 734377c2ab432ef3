"""Forks the ranks of a launch."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlaunch.agent.rank_process import RankProcess
from mlaunch.base import linux
from mlaunch.base.fds import OwnedFds, close_all, memory_file
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol import error_file, rich_output
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.launch_messages import RankStarted
from mlaunch.protocol.result_queue import Results
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import main as rank_main
from mlaunch.rank.base import RankArgs

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import (
        AgentsEnd,
        ControlHears,
        ControlSays,
        DebuggerHears,
        DebuggerSays,
        RankHears,
        RankSays,
    )

# The limit of open files is 1024 on many systems, and each rank has several of both sides until it is forked.
_AT_ONCE = 16  # ranks whose descriptors are open at the same time


@frozen_record
class ForkContext:
    """What forking needs besides the rank's number. ``owned``: descriptors that are not the ranks' business."""

    spec: LaunchSpec
    rendezvous: tuple[str, int]
    results: Results
    inherited: Call | None
    owned: OwnedFds


@frozen_record
class _PendingRank:
    """A rank that is about to be forked: the agent's ends of what they share, and the rank's."""

    args: RankArgs
    channel: Channel[RankSays, RankHears]
    control: Channel[ControlSays, ControlHears]
    stacks: int  # the pipe that its stacks come from
    readers: Sequence[int]  # of its streams
    writers: Mapping[int, int]  # by stream
    debug: Channel[DebuggerSays, DebuggerHears] | None  # the end of the launcher, which debugs

    def leave_to_rank(self) -> None:
        """Closes the rank's ends in another process: the agent, or another rank."""
        self.args.channel.close()
        self.args.control.close()
        if self.args.debug is not None:
            self.args.debug.close()
        close_all([self.args.stack_fd, *self.writers.values()])


def fork_ranks(context: ForkContext, launcher: AgentsEnd) -> list[RankProcess]:
    """Forks all ranks of this machine, then tells the launcher of them: the last rank need not wait for that."""
    ranks: list[RankProcess] = []
    for start in range(0, context.spec.local_world_size, _AT_ONCE):
        some = range(start, min(start + _AT_ONCE, context.spec.local_world_size))
        ranks += _fork_some([_prepare(context, local_rank) for local_rank in some], context, launcher)
    return ranks


def _fork_some(pending_ranks: Sequence[_PendingRank], context: ForkContext, launcher: AgentsEnd) -> list[RankProcess]:
    """Forks ranks with as little as can be between two forks: all that is written to after one is copied again."""
    # Preparing all before the first fork saves 200 copied pages a rank: 81 ms instead of 89 for a call of 8.
    forked = [(_fork(pending, pending_ranks, context.owned), time.monotonic()) for pending in pending_ranks]
    ranks = [_adopt(pending, pid, context.owned) for pending, (pid, _) in zip(pending_ranks, forked, strict=True)]
    for rank, pending, (pid, at) in zip(ranks, pending_ranks, forked, strict=True):
        if context.spec.stays:
            rank.give_answer_file()  # before the launcher, which hears of the rank now, can send it a call by itself
        ends = [rank.channel.fileno()] if context.spec.stays else []
        debugs = [] if pending.debug is None else [pending.debug.fileno()]
        leaving = [*debugs, *pending.readers]
        launcher.try_send(RankStarted(rank.rank, pid, at, len(ends) + len(debugs)), [*ends, *leaving])
        context.owned.close(*leaving)
    return ranks


def _prepare(context: ForkContext, local_rank: int) -> _PendingRank:
    spec = context.spec
    stacks_in, stacks_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    streams = {stream: os.pipe2(os.O_CLOEXEC) for stream in spec.streams(local_rank)}
    channel: Channel[RankSays, RankHears]
    control: Channel[ControlSays, ControlHears]
    debug: Channel[DebuggerSays, DebuggerHears] | None
    channel, theirs = Channel.pair()
    control, their_control = Channel.pair()
    debug, their_debug = Channel.pair() if spec.debug == "pdb" else (None, None)
    args = RankArgs(
        spec=spec,
        local_rank=local_rank,
        rendezvous=context.rendezvous,
        results=context.results,
        channel=theirs,
        crash_fd=memory_file(f"crash-{spec.rank(local_rank)}"),
        stack_fd=stacks_out,
        display_fd=streams[rich_output.STREAM][1] if rich_output.STREAM in streams else -1,
        control=their_control,
        inherited=context.inherited,
        debug=their_debug,
    )
    readers = [reader for reader, _ in streams.values()]
    ours = [channel.fileno(), control.fileno(), *([] if debug is None else [debug.fileno()])]
    context.owned.add(stacks_in, *ours, *readers)
    writers = {stream: writer for stream, (_, writer) in streams.items()}
    return _PendingRank(args, channel, control, stacks_in, readers, writers, debug)


def _adopt(pending: _PendingRank, pid: int, owned: OwnedFds) -> RankProcess:
    """Returns a rank that was forked, as its supervisor knows it."""
    args, spec = pending.args, pending.args.spec
    with contextlib.suppress(PermissionError, ProcessLookupError):  # both set it: whoever is first
        os.setpgid(pid, pid)
    pending.leave_to_rank()
    rank = RankProcess(
        rank=spec.rank(args.local_rank),
        local_rank=args.local_rank,
        pid=pid,
        pidfd=os.pidfd_open(pid),
        channel=pending.channel,
        crash_fd=args.crash_fd,
        stack_fd=pending.stacks,
        control=pending.control,
        error_file=error_file.path_of(spec, args.local_rank),
    )
    owned.add(rank.pidfd, rank.crash_fd)
    return rank


def _fork(pending: _PendingRank, all_of_them: Sequence[_PendingRank], owned: OwnedFds) -> int:
    """Forks one rank; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            linux.die_with(parent)
            # On both sides: whichever comes first, the group is there before anybody signals it.
            os.setpgid(0, 0)
            # A channel that a rank holds by mistake would keep its end from being seen.
            owned.close_in_child()
            for other in all_of_them:
                if other is not pending:
                    other.leave_to_rank()
                    os.close(other.args.crash_fd)
            for stream, writer in pending.writers.items():
                if stream != rich_output.STREAM:
                    os.dup2(writer, stream)
                    os.close(writer)
            pending.args.results.queue.close_reader()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        rank_main.run(pending.args)
    return pid
