"""One time for the ranks of several machines, whose clocks were compared while they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages.machine_messages import ClockCompared


@frozen_record
class RankTime:
    """How a rank's times are told. Seconds.

    ``zero``: the moment from which all times count, by the clock of the rank's machine; ``later``: what is added to the
    phases of the launch, which count from the call; ``error``: how far its times may be from those of the machine of
    rank 0; None: nobody has compared the two.
    """

    zero: float
    later: float = 0.0
    error: float | None = 0.0


@frozen_record
class Clocks:
    """What is known of them. ``begun``: when the call began, by this process's monotonic clock.

    ``compared``: by the first rank of each machine, in order of time. ``by_hand``: other machines of the launch have a
    caller each.
    """

    begun: float
    compared: Mapping[int, Sequence[ClockCompared]]
    by_hand: bool = False

    @property
    def zero(self) -> float:
        """The moment from which times count, by the clock of the machine of rank 0, once some were compared.

        It is the call; with a call on each machine it is when all were there, which all of their files have.
        """
        first = self.compared[min(self.compared)][0]
        return first.begun if self.by_hand else self.begun + first.epoch + first.ahead

    def of(self, rank: int, at: float) -> RankTime:
        """Says how a rank's times are told that are of about ``at``, by its machine's clock."""
        known = [seen for start, seen in self.compared.items() if start <= rank < start + seen[0].ranks]
        zero = self.zero
        if not known:
            return RankTime(zero, error=None)
        ahead, error = _ahead(known[0], at)
        return RankTime(zero - ahead, self.begun + known[0][0].epoch + ahead - zero, error)


def _ahead(seen: Sequence[ClockCompared], at: float) -> tuple[float, float]:
    """Returns what was compared nearest to a time, between two comparisons what lies between, and its error."""
    before = max((one for one in seen if one.at <= at), key=lambda one: one.at, default=seen[0])
    after = min((one for one in seen if one.at >= at), key=lambda one: one.at, default=seen[-1])
    if after.at <= before.at:
        return before.ahead, before.error
    share = (at - before.at) / (after.at - before.at)
    return before.ahead + share * (after.ahead - before.ahead), max(before.error, after.error)
