"""Authentication codes of exchanged objects, made with the launch's secret: a rank unpickles no stranger's object.

Ranks find each other through a store that other users of their machines may reach, so whoever is at the other end of a
connection need not be a rank. The code holds for one rank's object in one exchange of one group: what was sent before,
by somebody else, or in another group is refused like what was never sent.
"""

from __future__ import annotations

import hmac
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mlaunch.protocol import this_rank
from mlaunch.torch_parts import process_groups

SIZE = 32  # bytes that a blob begins with


@dataclass
class _Count:
    """The exchanges of one group since the call began, which every member begins in the same order."""

    group: bytes  # its name, its members, and which of those with both it is in this call
    call: int
    exchanges: int = 0


@dataclass
class _GroupNumbers:
    """How many groups of a description there were in a call; the same in all members, which make them in one order."""

    call: int = -1
    of: Counter[bytes] = field(default_factory=Counter)


_numbers = _GroupNumbers()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Count] = weakref.WeakKeyDictionary()


class Seal:
    """The seal (a MAC) of the next exchange of a group.

    Ranks of other launchers share no secret. What they exchange is checked only against accidents.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        me, call = this_rank.this_rank, this_rank.call
        self._secret = (me.secret if me is not None else "").encode()
        count = _counts.get(group)
        if count is None or count.call != call:  # one that was broken off may have left members with different counts
            count = _counts[group] = _Count(_numbered(_describe(group), call), call)
        count.exchanges += 1
        # Group, call and number: what was sent before, or elsewhere, bears another code.
        self._place = b"mlaunch object\0%d\0%d\0%b\0" % (call, count.exchanges, count.group)

    def put(self, blob: bytearray, source: int) -> None:
        """Write the code into the blob's first bytes. ``source``: the rank within the group that sends it."""
        blob[:SIZE] = self._code(memoryview(blob), source)

    def holds(self, blob: Any, source: int) -> bool:
        """True if that rank of the group has sent these bytes, in this exchange."""
        view = memoryview(blob)
        return hmac.compare_digest(bytes(view[:SIZE]), self._code(view, source))

    def _code(self, view: memoryview, source: int) -> bytes:
        code = hmac.new(self._secret, self._place + b"%d\0" % source, "sha256")
        code.update(view[SIZE:])
        return code.digest()


def _numbered(group: bytes, call: int) -> bytes:
    """Return a name that no group of this call has had: a default group that is made again has the name of the last."""
    if _numbers.call != call:
        _numbers.call, _numbers.of = call, Counter()
    _numbers.of[group] += 1
    return b"%b\0%d" % (group, _numbers.of[group])


def _describe(group: dist.ProcessGroup) -> bytes:
    ranks = dist.get_process_group_ranks(group)
    return f"{process_groups.name_of(group)}\0{','.join(map(str, ranks))}".encode()
