"""What keeps a stranger's objects from being unpickled: each travels with a code that takes the launch's secret.

Ranks find each other through a store that other users of their machines may reach, so whoever is at the other end of a
connection need not be a rank. The code holds for one rank's object in one exchange of one group: what was sent before,
by somebody else, or in another group is refused like what was never sent.
"""

from __future__ import annotations

import hmac
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mlaunch.protocol import this_rank

SIZE = 32  # bytes that a blob begins with


@dataclass
class _Count:
    """The exchanges of one group since the call began, which every member begins in the same order."""

    group: bytes  # its name and its members
    call: int
    exchanges: int = 0


_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Count] = weakref.WeakKeyDictionary()


class Seal:
    """The seal (a MAC) of the next exchange of a group.

    Ranks of other launchers share no secret. What they exchange is checked against accidents alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        me, call = this_rank.this_rank, this_rank.call
        self._secret = (me.secret if me is not None else "").encode()
        count = _counts.get(group)
        if count is None:
            count = _counts[group] = _Count(_describe(group), call)
        if count.call != call:  # one that was broken off may have left members with different counts
            count.call, count.exchanges = call, 0
        count.exchanges += 1
        # Group, call and number: what was sent before, or elsewhere, bears another code.
        self._place = b"mlaunch object\0%d\0%d\0%b\0" % (call, count.exchanges, count.group)

    def put(self, blob: bytearray, source: int) -> None:
        """Writes the code into the blob's first bytes. ``source``: the rank within the group that sends it."""
        blob[:SIZE] = self._code(memoryview(blob), source)

    def holds(self, blob: Any, source: int) -> bool:
        """Tells whether that rank of the group has sent these bytes, in this exchange."""
        view = memoryview(blob)
        return hmac.compare_digest(bytes(view[:SIZE]), self._code(view, source))

    def _code(self, view: memoryview, source: int) -> bytes:
        code = hmac.new(self._secret, self._place + b"%d\0" % source, "sha256")
        code.update(view[SIZE:])
        return code.digest()


def _describe(group: dist.ProcessGroup) -> bytes:
    ranks = dist.get_process_group_ranks(group)
    name = dist.distributed_c10d._world.pg_names[group]
    return f"{name}\0{','.join(map(str, ranks))}".encode()
