"""The launch whose rank this process is, for code that runs in it."""

from __future__ import annotations

from dataclasses import field

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class ThisRank:
    """A rank of this package's launcher. ``secret`` is shared by the ranks of its launch."""

    function: str
    rank: int
    secret: str = field(default="", repr=False)


this_rank: ThisRank | None = None  # set when the process becomes a rank
call = 0  # the number of the call that it answers, where ranks stay for several
