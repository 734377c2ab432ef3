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
class Nursery:
    """What forking needs besides the rank's number. ``owned``: descriptors that are not the ranks' business."""

    spec: LaunchSpec
    rendezvous: tuple[str, int]
    results: Results
    inherited: Call | None
    owned: OwnedFds


@frozen_record
class _Cradle:
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


def fork_ranks(nursery: Nursery, launcher: AgentsEnd) -> list[RankProcess]:
    """Forks all ranks of this machine, then tells the launcher of them: the last rank need not wait for that."""
    ranks: list[RankProcess] = []
    for start in range(0, nursery.spec.local_world_size, _AT_ONCE):
        some = range(start, min(start + _AT_ONCE, nursery.spec.local_world_size))
        ranks += _fork_some([_prepare(nursery, local_rank) for local_rank in some], nursery, launcher)
    return ranks


def _fork_some(cradles: Sequence[_Cradle], nursery: Nursery, launcher: AgentsEnd) -> list[RankProcess]:
    """Forks ranks with as little as can be between two forks: all that is written to after one is copied again."""
    # Preparing all before the first fork saves 200 copied pages a rank: 81 ms instead of 89 for a call of 8.
    forked = [(_fork(cradle, cradles, nursery.owned), time.monotonic()) for cradle in cradles]
    ranks = [_adopt(cradle, pid, nursery.owned) for cradle, (pid, _) in zip(cradles, forked, strict=True)]
    for rank, cradle, (pid, at) in zip(ranks, cradles, forked, strict=True):
        if nursery.spec.stays:
            rank.give_answer_file()  # before the launcher, which hears of the rank now, can send it a call by itself
        ends = [rank.channel.fileno()] if nursery.spec.stays else []
        debugs = [] if cradle.debug is None else [cradle.debug.fileno()]
        leaving = [*debugs, *cradle.readers]
        launcher.try_send(RankStarted(rank.rank, pid, at, len(ends) + len(debugs)), [*ends, *leaving])
        nursery.owned.close(*leaving)
    return ranks


def _prepare(nursery: Nursery, local_rank: int) -> _Cradle:
    spec = nursery.spec
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
        rendezvous=nursery.rendezvous,
        results=nursery.results,
        channel=theirs,
        crash_fd=memory_file(f"crash-{spec.rank(local_rank)}"),
        stack_fd=stacks_out,
        display_fd=streams[rich_output.STREAM][1] if rich_output.STREAM in streams else -1,
        control=their_control,
        inherited=nursery.inherited,
        debug=their_debug,
    )
    readers = [reader for reader, _ in streams.values()]
    ours = [channel.fileno(), control.fileno(), *([] if debug is None else [debug.fileno()])]
    nursery.owned.add(stacks_in, *ours, *readers)
    writers = {stream: writer for stream, (_, writer) in streams.items()}
    return _Cradle(args, channel, control, stacks_in, readers, writers, debug)


def _adopt(cradle: _Cradle, pid: int, owned: OwnedFds) -> RankProcess:
    """Returns a rank that was forked, as its supervisor knows it."""
    args, spec = cradle.args, cradle.args.spec
    with contextlib.suppress(PermissionError, ProcessLookupError):  # both set it: whoever is first
        os.setpgid(pid, pid)
    cradle.leave_to_rank()
    rank = RankProcess(
        rank=spec.rank(args.local_rank),
        local_rank=args.local_rank,
        pid=pid,
        pidfd=os.pidfd_open(pid),
        channel=cradle.channel,
        crash_fd=args.crash_fd,
        stack_fd=cradle.stacks,
        control=cradle.control,
        error_file=error_file.path_of(spec, args.local_rank),
    )
    owned.add(rank.pidfd, rank.crash_fd)
    return rank


def _fork(cradle: _Cradle, all_of_them: Sequence[_Cradle], owned: OwnedFds) -> int:
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
                if other is not cradle:
                    other.leave_to_rank()
                    os.close(other.args.crash_fd)
            for stream, writer in cradle.writers.items():
                if stream != rich_output.STREAM:
                    os.dup2(writer, stream)
                    os.close(writer)
            cradle.args.results.queue.close_reader()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        rank_main.run(cradle.args)
    return pid
