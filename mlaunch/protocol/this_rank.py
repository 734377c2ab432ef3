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


this_rank: ThisRank | None = None  # the rank that this process is, if it is one
call = 0  # the number of the call that it answers, if ranks stay for several


def become(rank: ThisRank) -> None:
    """Note that this process is a rank from now on."""
    global this_rank  # noqa: PLW0603 - a fact about this process
    this_rank = rank


def begin_call(number: int) -> None:
    """Note which call the rank answers from now on."""
    global call  # noqa: PLW0603 - a fact about this process
    call = number
