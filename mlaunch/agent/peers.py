"""The other machines of a launch, as its agent knows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mlaunch.base.frozen_record import frozen_record

if TYPE_CHECKING:
    from mlaunch.base.exceptions import RankFailure
    from mlaunch.machines.gate.store_process import StoreProcess
    from mlaunch.protocol.messages import ForPart, PartSays
    from mlaunch.protocol.spec import LaunchSpec


class Peers:
    """There are none, and nothing is told or awaited: ``machines/agent/linked_peers.py`` has those that there are.

    Attributes:
        agree: Each machine has a caller of its own, so they have to agree on when to stop.
        pids: Of processes that nobody else reaps.
    """

    agree = False
    pids: Sequence[int] = ()

    @property
    def awaited(self) -> bool:
        """Whether some have not finished."""
        return False

    def fds(self) -> list[int]:
        return []

    def due(self) -> float | None:
        """Return when the way to them will count as lost, in monotonic seconds."""
        return None

    def hear(self, ready: Collection[int]) -> RankFailure | None:  # noqa: ARG002 - others need it
        """Return the first failure of another machine, if that is the news."""
        return None

    def take_words(self) -> list[ForPart]:
        """Return what has come for features' parts from where the machines meet, once."""
        return []

    def say(self, record: PartSays) -> None:
        """Say a word of a feature's part there."""

    def tell(self, failure: RankFailure) -> None:
        """Send them the first failure here; those that follow go to this machine's caller."""

    def finish(self) -> None:
        """Tell them that this machine's ranks are gone."""


@frozen_record
class Joined:
    """What came of joining. ``server``: of the gate and the launch's store, if this machine has it."""

    spec: LaunchSpec
    server: StoreProcess | None
    peers: Peers
