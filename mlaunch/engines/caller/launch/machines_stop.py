"""The machines of a launch as members that agree on the step at which all of their ranks stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from mlaunch.agreed_stop.wire import (
    NAME,
    AgreedStop,
    AskToStop,
    FreezeRanks,
    RanksFrozen,
    StopAgreed,
    StopRanks,
    ThawRanks,
    is_look,
    terms_of,
)
from mlaunch.base.text import printable
from mlaunch.engines.caller.launch.machine import Machine
from mlaunch.engines.caller.launch.machines_inspection import MachinesInspection
from mlaunch.protocol.messages import ForPart, PartSays

if TYPE_CHECKING:
    from mlaunch.protocol.messages import AgentSays

_REASON = 100  # bytes


class MachinesStop:
    """The agreement of a launch's machines. Each machine's agent freezes, reminds and at last ends its own ranks.

    ``there``: the machines that have not ended, by descriptor; ``tell``: sends a record to the launch's handle;
    ``inspection``: receives the requests of ``mlaunch stop``.
    """

    def __init__(
        self, there: Mapping[int, Machine], tell: Callable[[AgentSays], None], inspection: MachinesInspection
    ) -> None:
        self._there = there
        self._tell = tell
        self._inspection = inspection
        self._terms = terms_of(inspection.launch.sections)
        self._agreed: AgreedStop | None = None
        self._call, self._reason, self._asked = 0, "", 0.0

    def begin_call(self, call: int) -> None:
        """Note the start of a call on ranks that stay."""
        self._call, self._agreed = call, None

    def end_call(self) -> None:
        """Tell the processes that asked for the call's stop that it is over."""
        self._inspection.end_request()
        self._agreed = None

    def ask(self, reason: str, call: int, by: int | None = None) -> None:
        """Begin to agree on a step. A second request changes nothing. ``by``: see ``AgreedStop.asked_by``."""
        if self._agreed is None and call == self._call:
            self._reason, self._asked = reason, time.time()
            self._agreed = AgreedStop(self, time.monotonic, by)
            self._agreed.begin(self._terms.grace / 2)

    def serve(self) -> int | None:
        """Handle requests of ``mlaunch stop``, and take the steps of the agreement that are due.

        Returns:
            The process that wants the launch to end at once, or whose request no rank would notice; None if there is
            none.
        """
        if (asked_by := self._inspection.take_request()) is not None:
            self.ask("asked", self._call, None if self._terms.expected else asked_by)
        agreed = self._agreed
        if agreed is not None and agreed.take_steps() and agreed.look is not None:
            self._tell(PartSays(NAME, StopAgreed(self._reason, self._asked, agreed.look)))
        unused_by = agreed.asked_by if agreed is not None and agreed.unused else None
        return unused_by if self._inspection.stopped_by is None else self._inspection.stopped_by

    def take(self, machine: Machine, news: object) -> bool:
        """Handle news of a machine: its ranks wait, or a signal has come there that asks all ranks to stop.

        Returns:
            False if the news is for the launch's handle.
        """
        if isinstance(news, AskToStop):
            self.ask(printable(news.reason, _REASON), self._call)
        elif not isinstance(news, RanksFrozen):
            return False
        elif self._agreed is not None and news.call == self._call and is_look(news.looks):
            self._agreed.freeze.take(machine.number, news.looks)
        return True

    @property
    def due(self) -> float:
        return float("inf") if self._agreed is None else self._agreed.due

    # The machines as members

    def working(self) -> Collection[int]:
        return [machine.number for machine in self._there.values()]

    def freeze(self, member: int) -> None:
        self._send(member, FreezeRanks(self._reason))

    def thaw(self, member: int) -> None:
        self._send(member, ThawRanks())

    def stop_at(self, member: int, look: int) -> None:
        self._send(member, StopRanks(look, self._reason))

    def _send(self, member: int, word: FreezeRanks | ThawRanks | StopRanks) -> None:
        for machine in self._there.values():
            if machine.number == member:
                machine.stream.send(ForPart(NAME, self._call, word))
