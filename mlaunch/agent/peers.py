"""The other machines of a launch, as its agent knows them; and its end if there is no launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base.deadline import NEVER
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import AgentsEnd, ForPart, PartSays, Refused

if TYPE_CHECKING:
    from mlaunch.base.exceptions import RankFailure
    from mlaunch.machines.gate.store_process import StoreProcess
    from mlaunch.protocol.spec import LaunchSpec

# After a failure nobody waits for the others longer than it takes to tell them.
_FAREWELL_TIMEOUT = 1.0  # seconds for the other machines to hear of a failure


class Peers:
    """There are none, and nothing is told or awaited: ``machines/agent/linked_peers.py`` has those that there are.

    Attributes:
        alone: There are none.
        agree: Each machine has a caller of its own, so they have to agree on when to stop.
        pids: Of processes that nobody else reaps.
    """

    alone = True
    agree = False
    pids: Sequence[int] = ()

    @property
    def awaited(self) -> bool:
        """True if some have not finished."""
        return False

    def fds(self) -> list[int]:
        return []

    def due(self) -> float:
        """Return when the way to them will count as lost, in monotonic seconds."""
        return NEVER

    def hear(self, ready: Collection[int]) -> RankFailure | ForPart | None:  # noqa: ARG002 - others need it
        """Return the first failure of another machine, or a word for a feature's part, if that is the news."""
        return None

    def say(self, record: PartSays) -> None:
        """Say a word of a feature's part there."""

    def tell(self, failure: RankFailure) -> None:
        """Send them the first failure here; those that follow go to this machine's caller."""

    def finish(self) -> None:
        """Tell them that this machine's ranks are gone."""


class SharedFailure:
    """The failure of this machine that its peers are told. ``clock`` gives monotonic seconds."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._first: RankFailure | None = None
        self.farewell_at = NEVER  # when we no longer wait for the peers to hear of it

    def remember(self, describe: Callable[[], RankFailure]) -> None:
        """Keep the first failure here, or the first that is no consequence, if there are peers."""
        if not self._peers.awaited or (self._first is not None and not self._first.consequence):
            return
        failure = describe()
        if self._first is None or not failure.consequence:
            self._first = failure

    def tell(self) -> None:
        """Tell the peers why the ranks here are stopped."""
        if self._first is not None:
            self._peers.tell(self._first)

    def is_awaited(self, *, stopping: bool) -> bool:
        """True if the peers' ranks may still be there. After a failure they are given the time to hear of it."""
        self._peers.finish()
        if stopping and self.farewell_at == NEVER:
            self.tell()
            self.farewell_at = self._clock() + _FAREWELL_TIMEOUT
        return self._peers.awaited and self._clock() < self.farewell_at


@frozen_record
class Joined:
    """The result of joining. ``server``: the process with the gate and the launch's store, if this machine has it."""

    spec: LaunchSpec
    server: StoreProcess | None
    peers: Peers


class NoLaunchError(Exception):
    """The machines did not come together, or have no room; the launcher has been told."""


def refuse(launcher: AgentsEnd, why: str, *, late: bool = False) -> NoReturn:
    """Tell the launcher why there is no launch. ``late``: its deadline has passed."""
    launcher.try_send(Refused(why, late=late))
    raise NoLaunchError
