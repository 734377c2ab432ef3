"""A call of nothing, which a rank that was prepared makes while nobody waits for it.

The first call of a process is the slow one. A forked process copies each page that it writes to, some 300 for a small
call, and Python and torch prepare much where they are first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlaunch.base.fds import close_all, memory_file
from mlaunch.protocol import calls, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.launch_messages import Phase, RunCall
from mlaunch.protocol.messages.prepared_messages import details_of
from mlaunch.protocol.result_queue import Results
from mlaunch.rank import remote_error
from mlaunch.rank.base import RankArgs

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import RankHears, RankSays


@contextlib.contextmanager
def stage(args: RankArgs) -> Iterator[RankArgs]:
    """Yields what a rank is given for it: a channel in which the call is, a queue and a board that nobody reads."""
    ours: Channel[RankSays, RankHears]
    ours, theirs = Channel.pair()
    results = Results(args.spec.local_world_size)
    # In a file, though the call would fit into its record: to map one is part of what is rehearsed.
    files = [memory_file("rehearsal"), memory_file("rehearsal")]
    try:
        # Of 500 page faults of a rank in its first small call 200 are left, half of them for the import of the
        # function's module; a call of 2, 4 and 8 ranks after a pause takes 0.90, 0.79 and 0.73 of the time.
        payload.write(files[0], Call(calls.portable(play), (), {}))
        ours.send(RunCall(0, attached=True, details=details_of(args.spec)), files)
        yield dataclasses.replace(args, channel=theirs, results=results)
    finally:
        close_all(files)
        for thing in (ours, theirs, results.queue, results.board):
            thing.close()


def play() -> float:
    """Takes part in an operation, describes an exception, returns a value. Collective, over all ranks."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1)
    if dist.get_backend() == "gloo":  # others may do much at their first operation, or offer none for a CPU
        dist.all_reduce(value)
    # All ranks of a call that fails describe an exception while their caller waits.
    try:
        raise ValueError("a rehearsal")
    except ValueError as error:
        pickle.dumps(remote_error.describe(error, Phase.RUNNING, "cpu", catchable=True))
    return value.item()
