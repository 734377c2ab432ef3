"""The first failure of a launch over several machines: each machine tells the others of its own."""

from __future__ import annotations

from collections.abc import Callable

from mlaunch.agent.peers import FAREWELL_TIMEOUT, Peers
from mlaunch.base.exceptions import RankFailure


class SharedFailure:
    """What the peers are told of this machine's failures. ``clock`` gives monotonic seconds."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._first: RankFailure | None = None
        self.farewell_at: float | None = None  # when we no longer wait for the peers to hear of it

    def remember(self, describe: Callable[[], RankFailure]) -> None:
        """Keeps the first failure here, or the first that is no consequence, for the peers if there are any."""
        if not self._peers.awaited or (self._first is not None and not self._first.consequence):
            return
        failure = describe()
        if self._first is None or not failure.consequence:
            self._first = failure

    def tell(self) -> None:
        """Tells the peers why the ranks here are stopped."""
        if self._first is not None:
            self._peers.tell(self._first)

    def is_awaited(self, *, stopping: bool) -> bool:
        """Tells whether the peers' ranks may still be there. After a failure they are given the time to hear of it."""
        self._peers.finish()
        if stopping and self.farewell_at is None:
            self.tell()
            self.farewell_at = self._clock() + FAREWELL_TIMEOUT
        return self._peers.awaited and not (self.farewell_at is not None and self._clock() >= self.farewell_at)
