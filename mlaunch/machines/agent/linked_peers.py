"""The other machines of a launch, which its agent reaches by a link: they share the first failure, and end together."""

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
    """The other machines of a launch, which the agent reaches by its link, a process.

    ``timeout``: seconds after which a silent link counts as lost, and is killed.
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
        """Return when a link that stays silent counts as lost, in monotonic seconds."""
        return self._heard_at + self._timeout if self.fds() else NEVER

    def hear(self, ready: Collection[int]) -> RankFailure | ForPart | None:
        """Read from the link; return a failure of another machine, a record for a feature's part, or None.

        A link that is silent for too long is a failure, too, and so is one that dies before any other failure.
        """
        if self._over:
            return None
        if self._link.channel.fileno() not in ready:
            return self._miss(self._link)
        # Any record counts: the link's heartbeat is for times when it has nothing else to send.
        self._heard_at = time.monotonic()
        try:
            record, _ = self._link.channel.receive()
        except EOFError:
            self._over = True
            if self._told:  # after a failure the link has nothing more to do
                return None
            return RankFailure(None, self._link.pid, "died", subject=_LINK, kind="lost")
        match record:
            case AllGone():
                self._over = True
            case RankFailure() | ForPart():
                self._told = self._told or isinstance(record, RankFailure)
                return record
            case Beat() | Waiting() | Planned() | Refused():  # from before the launch began
                pass
            case _:
                assert_never(record)
        return None

    def say(self, record: PartSays) -> None:
        """Send a record of a feature's part to the other machines."""
        self._link.channel.try_send(record)

    def _miss(self, link: Link) -> RankFailure | None:
        """Kill a link that has said nothing for too long (somebody has stopped it); return the failure, or None."""
        if time.monotonic() < self._heard_at + self._timeout:
            return None
        self._over = True
        os.kill(link.pid, signal.SIGKILL)  # our child, not reaped yet: no other process has its pid
        return RankFailure(None, link.pid, silence(self._timeout), subject=_LINK, kind="lost")

    def tell(self, failure: RankFailure) -> None:
        """Send a failure to the other machines if it is the first; later ones go only to this machine's caller."""
        if not self._told:
            self._told = True
            self._link.channel.try_send(shortened(failure))

    def finish(self) -> None:
        """Tell the other machines, once, that this machine's ranks are gone."""
        if not self._finished:
            self._finished = True
            self._link.channel.try_send(Done())

    @property
    def awaited(self) -> bool:
        """True if ranks of other machines may still run."""
        return not self._over


def silence(seconds: float) -> str:
    """Return the end of a sentence about a link that was killed after so many seconds of silence."""
    return f"said nothing for {seconds:g} s (was it stopped?) and was killed"
