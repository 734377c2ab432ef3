"""The other machines of a launch, at the far end of a link: its agent shares the first failure, and ends with them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

from mlaunch.agent.peers import Peers
from mlaunch.base.deadline import NEVER
from mlaunch.base.exceptions import RankFailure
from mlaunch.machines.gate.membership import shortened
from mlaunch.machines.link.link_handle import Link
from mlaunch.machines.wire.link_messages import AllGone, Beat, Done, Planned
from mlaunch.protocol.channel import assert_never
from mlaunch.protocol.messages import ForPart, PartSays, Refused, Waiting

_LINK = "the process that talks to the other machines"  # as messages call it


class LinkedPeers(Peers):
    """Those at the other ends of a link, which is a process.

    ``timeout``: seconds after which a link that does not say a word counts as lost, and is killed.
    """

    def __init__(self, link: Link, timeout: float = 0.0, *, by_engine: bool = False) -> None:
        self._link, self.alone = link, False
        self.agree = not by_engine
        self.pids = [link.pid]
        self._timeout = timeout
        self._heard_at = time.monotonic()
        self._over, self._told = False, False
        self._finished = False

    def fds(self) -> list[int]:
        return [] if self._over else [self._link.channel.fileno()]

    def due(self) -> float:
        """Return when the link will count as lost, in monotonic seconds."""
        return self._heard_at + self._timeout if self.fds() else NEVER

    def hear(self, ready: Collection[int]) -> RankFailure | ForPart | None:
        """Return the first failure of another machine, or a word for a feature's part, if that is the news."""
        if self._over:
            return None
        if self._link.channel.fileno() not in ready:
            return self._miss(self._link)
        # Any word counts: the link's heartbeat is only for when there is nothing else to say.
        self._heard_at = time.monotonic()
        try:
            record, _ = self._link.channel.receive()
        except EOFError:
            self._over = True
            if self._told:  # after a failure it has nothing more to do
                return None
            return RankFailure(None, self._link.pid, "died", subject=_LINK, kind="lost")
        match record:
            case AllGone():
                self._over = True
            case RankFailure() | ForPart():
                self._told = self._told or isinstance(record, RankFailure)
                return record
            case Beat() | Waiting() | Planned() | Refused():  # of the time before
                pass
            case _:
                assert_never(record)
        return None

    def say(self, record: PartSays) -> None:
        """Say a word of a feature's part there."""
        self._link.channel.try_send(record)

    def _miss(self, link: Link) -> RankFailure | None:
        """Give up a link that has said nothing for too long: somebody has stopped it."""
        if time.monotonic() < self._heard_at + self._timeout:
            return None
        self._over = True
        os.kill(link.pid, signal.SIGKILL)  # it is our child and not reaped, so the number is its own
        return RankFailure(None, link.pid, silence(self._timeout), subject=_LINK, kind="lost")

    def tell(self, failure: RankFailure) -> None:
        """Send them the first failure here; those that follow go to this machine's caller."""
        if not self._told:
            self._told = True
            self._link.channel.try_send(shortened(failure))

    def finish(self) -> None:
        """Tell them that this machine's ranks are gone."""
        if not self._finished:
            self._finished = True
            self._link.channel.try_send(Done())

    @property
    def awaited(self) -> bool:
        """True if some have not finished."""
        return not self._over


def silence(seconds: float) -> str:
    """Return why a link counts as lost, for a sentence about it."""
    return f"said nothing for {seconds:g} s (was it stopped?) and was killed"
