"""The supervisor of ranks that stay where other machines have some, too: who calls them all compares what they tell.

    running --failure or deadline here, or EndCall for one elsewhere--> asking --> calling back
            --all here have answered--> telling --RanksBack--> waiting for the others --MeetAgain--> meeting --> idle

An agent ends its own ranks' part of a call. Numbers that agree here may differ from those of another machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mlaunch.agent.kept.many_calls import KeptSupervisor
from mlaunch.base.fds import memory_file
from mlaunch.protocol import payload
from mlaunch.protocol.messages import AgentHears, EndCall, Errand, MeetAgain, RanksBack, RanksStand
from mlaunch.rank.in_step import Numbers


class KeptPartSupervisor(KeptSupervisor):
    """Whether they are in step can be told of all machines' ranks alone."""

    def _obey(self, record: AgentHears | None, fds: list[int]) -> bool:
        if isinstance(record, MeetAgain):
            if record.number == self._call.number and not self._lacks_ranks():
                self._send_on(Errand.MEET)
            return True
        return super()._obey(record, fds)

    def _end_callers(self, asked: EndCall) -> None:
        """Asks ranks that are back already where they stand: some on another machine are not back, or have failed."""
        if not self._call.released:
            super()._end_callers(asked)
        elif not self._failed and not self._lacks_ranks():
            self._failed = True
            self._send_on(Errand.TELL_NUMBERS)

    def _waits_in_vain(self, back: Sequence[int]) -> bool:
        """Tells the launcher, too, who finds it out for all machines."""
        self._tell(RanksStand(self._call.number, tuple(back)), dict(self._numbers.told))
        return super()._waits_in_vain(back)

    def _compare(self, told: Sequence[Numbers]) -> None:
        ranks = (rank.rank for rank in self._by_local_rank)
        self._tell(RanksBack(self._call.number), dict(zip(ranks, told, strict=True)))

    def _tell(self, record: RanksBack | RanksStand, told: Mapping[int, Numbers]) -> None:
        memfd = memory_file("numbers")
        payload.write(memfd, told)
        self._launcher.try_send(record, [memfd])
        os.close(memfd)
