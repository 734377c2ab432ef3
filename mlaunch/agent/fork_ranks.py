"""The forks that become a launch's ranks."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlaunch.agent import machine_limits
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision import refuse
from mlaunch.base import linux
from mlaunch.base.deadline import Deadline
from mlaunch.base.fds import OwnedFds, close_all, memory_file
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol import launch_files
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import (
    AgentHears,
    AgentsEnd,
    Cancel,
    ControlHears,
    ControlSays,
    EndRanks,
    RankHears,
    RankSays,
    RankStarted,
)
from mlaunch.protocol.result_queue import Results
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import function
from mlaunch.rank.base import RankArgs

# The limit of open files is 1024 on many systems, and each rank has several of both sides until it is forked.
_AT_ONCE = 16  # ranks whose descriptors are open at the same time
_STANDARD = {1, 2}  # streams


class NoRoomError(Exception):
    """The kernel refused to fork, with the reason."""


@dataclass
class EarlyWatch:
    """A watch over a launch without a supervisor yet: its caller, its fork server or its deadline may end it.

    ``said``: what the launcher has said meanwhile, with descriptors, for the supervisor.
    """

    launcher: AgentsEnd
    parent: int  # a pidfd of the fork server
    owned: OwnedFds
    deadline: Deadline
    said: list[tuple[AgentHears | None, list[int]]] = field(default_factory=list)

    def is_over(self, ranks: Sequence[RankProcess]) -> bool:
        """True if somebody ends it, or a rank has ended. The supervisor finds the same once more."""
        sources = [self.launcher.fileno(), self.parent, *(rank.pidfd for rank in ranks)]
        while (ready := linux.wait_readable(sources, 0.0)) == sources[:1]:
            record, fds = self.launcher.hear()
            self.owned.add(*fds)
            self.said.append((record, fds))
            if record is None or isinstance(record, Cancel | EndRanks):
                return True
        return bool(ready) or time.monotonic() >= self.deadline.due


@frozen_record
class ForkContext:
    """The facts that a fork of a rank needs, except its number. ``owned``: descriptors that ranks must not have."""

    spec: LaunchSpec
    rendezvous: tuple[str, int]
    results: Results
    inherited: Call | None
    owned: OwnedFds
    watch: EarlyWatch


@frozen_record
class _PendingRank:
    """A rank that is about to be forked: the agent's ends of what they share, and the rank's."""

    args: RankArgs
    channel: Channel[RankSays, RankHears]
    control: Channel[ControlSays, ControlHears]
    stacks: int  # the pipe that its stacks come from
    readers: Sequence[int]  # of its streams
    writers: Mapping[int, int]  # by stream

    def leave_to_rank(self) -> None:
        """Close the rank's ends in another process: the agent, or another rank."""
        self.args.channel.close()
        self.args.control.close()
        close_all([self.args.stack_fd, *self.writers.values()])


def fork_ranks(context: ForkContext, launcher: AgentsEnd) -> list[RankProcess]:
    """Fork all ranks of this machine, then tell the launcher of them: the last rank need not wait for that.

    Return fewer ranks if the launch is to end already; their supervisor finds that out, too.

    Raises:
        NoLaunchError: The machine has no room for so many; the launcher has been told.
    """
    ranks: list[RankProcess] = []
    size = context.spec.local_world_size
    for start in range(0, size, _AT_ONCE):
        if ranks and context.watch.is_over(ranks):
            break
        if ranks and (short := machine_limits.runs_short()):
            refuse(launcher, f"{short} after {start} of {size} ranks were forked; give fewer ranks")
        some = range(start, min(start + _AT_ONCE, size))
        try:
            ranks += _fork_some([_prepare(context, local_rank) for local_rank in some], context, launcher)
        except NoRoomError as error:
            refuse(launcher, f"one of its {size} ranks could not be forked: {error}")
    return ranks


def _fork_some(pending_ranks: Sequence[_PendingRank], context: ForkContext, launcher: AgentsEnd) -> list[RankProcess]:
    """Fork ranks, with as little as possible between two forks: a page that is written to after one is copied again."""
    # Preparing all before the first fork saves 200 copied pages a rank: 81 ms instead of 89 for a call of 8.
    forked = [(_fork(pending, pending_ranks, context.owned), time.monotonic()) for pending in pending_ranks]
    ranks = [_adopt(pending, pid, context.owned) for pending, (pid, _) in zip(pending_ranks, forked, strict=True)]
    for rank, pending, (pid, at) in zip(ranks, pending_ranks, forked, strict=True):
        if context.spec.stays:
            rank.give_answer_file()  # before the launcher, which learns of the rank now, can send it a call by itself
        ends = [rank.channel.fileno()] if context.spec.stays else []
        launcher.try_send(RankStarted(rank.rank, pid, at, len(ends)), [*ends, *pending.readers])
        context.owned.close(*pending.readers)
    return ranks


def _prepare(context: ForkContext, local_rank: int) -> _PendingRank:
    spec = context.spec
    stacks_in, stacks_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    readers, writers = [], {}
    for stream in spec.streams(local_rank):
        reader, writers[stream] = os.pipe2(os.O_CLOEXEC)
        readers.append(reader)
    channel: Channel[RankSays, RankHears]
    control: Channel[ControlSays, ControlHears]
    channel, theirs = Channel.pair()
    control, their_control = Channel.pair()
    args = RankArgs(
        spec=spec,
        local_rank=local_rank,
        rendezvous=context.rendezvous,
        results=context.results,
        channel=theirs,
        crash_fd=memory_file(f"crash-{spec.rank(local_rank)}"),
        stack_fd=stacks_out,
        pipes={stream: writer for stream, writer in writers.items() if stream not in _STANDARD},
        control=their_control,
        inherited=context.inherited,
    )
    context.owned.add(stacks_in, channel.fileno(), control.fileno(), *readers)
    return _PendingRank(args, channel, control, stacks_in, readers, writers)


def _adopt(pending: _PendingRank, pid: int, owned: OwnedFds) -> RankProcess:
    """Return a rank that was forked, as its supervisor knows it."""
    args, spec = pending.args, pending.args.spec
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
        error_file=launch_files.error_file_of(spec, args.local_rank),
        of_python=spec.target is None or spec.target.of_python,
    )
    owned.add(rank.pidfd, rank.crash_fd)
    return rank


def _fork(pending: _PendingRank, all_of_them: Sequence[_PendingRank], owned: OwnedFds) -> int:
    """Fork one rank; return its pid."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise NoRoomError(machine_limits.why_no_fork(error)) from error
    if pid == 0:
        try:
            linux.die_with(parent)
            # Sessions, not processes, get equal shares of a busy machine (autogroups, the default). Before it, the
            # agent's signals reach the rank by its pidfd.
            os.setsid()
            # A channel that a rank holds by mistake would keep its end from being seen.
            owned.close_in_child()
            for other in all_of_them:
                if other is not pending:
                    other.leave_to_rank()
                    os.close(other.args.crash_fd)
            for stream, writer in pending.writers.items():
                if stream in _STANDARD:
                    os.dup2(writer, stream)
                    os.close(writer)
            pending.args.results.queue.close_reader()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        function.run(pending.args)
    return pid
