"""The agents of all machines as one, for ranks that stay: it sends them calls, and compares where they stand.

    over --NextCall--> running --all have come back--> over
    running --failure, deadline, end--> comparing (once all have come back) --they agree--> meeting --> over

A machine's agent ends its own ranks' part of a call that fails there; the others are asked to end theirs. Whether all
are in step can only be told of all: their numbers come here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from mlaunch.engines.caller.launch.agents_of_machines import MergedAgent
from mlaunch.engines.caller.launch.machine import Machine
from mlaunch.engines.caller.launch.timeouts import EndOf, Patience
from mlaunch.engines.caller.launch.visitors_of_machines import Lookout
from mlaunch.protocol import payload
from mlaunch.protocol.messages import (
    AgentHears,
    AgentSays,
    AnswerKind,
    CallOver,
    Cancel,
    DeadlinePassed,
    EndCall,
    EndRanks,
    MeetAgain,
    NextCall,
    RankAnswered,
    RankGone,
    RanksBack,
    RanksStand,
    Reaped,
)
from mlaunch.rank import in_step


class _State(enum.Enum):
    OVER = enum.auto()
    RUNNING = enum.auto()
    COMPARING = enum.auto()
    MEETING = enum.auto()


class KeptAgents(MergedAgent):
    """Of one set of ranks, which makes one call after the other."""

    def __init__(
        self, machines: Sequence[Machine], world_size: int, end_of: EndOf, times: Patience, lookout: Lookout
    ) -> None:
        super().__init__(machines, world_size, end_of, times, lookout)
        self._number = 0  # of the call
        self._state = _State.OVER
        self._back: set[int] = set()  # numbers of the machines that have said that it is over
        self._told: dict[int, in_step.Numbers] = {}  # by rank, what it has entered
        self._here: set[int] = set()  # ranks that are back
        self._complete: set[int] = set()  # numbers of the machines all of whose ranks are
        self._unsaid: CallOver | None = None  # until what ranks have printed before is on its way
        self._printed: dict[tuple[int, int], int] = {}  # where that ends
        self._leaving = False  # the ranks were asked to, or told to stop

    def _obey(self, record: AgentHears, fds: Sequence[int]) -> None:
        if isinstance(record, NextCall):
            self._number, self._state = record.number, _State.RUNNING
            self._stop.begin_call(record.number)
            for known in (self._back, self._told, self._here, self._complete):
                known.clear()
            self._send(record, fds[0] if fds else -1)
        elif isinstance(record, EndCall):
            self._end_call(record.number)
        elif isinstance(record, EndRanks):
            self._leaving = True
            self._send(record)
        else:
            self._leaving = True
            super()._obey(record, fds)

    def _end_call(self, number: int, failed: Machine | None = None) -> None:
        """Lets the machines end the call, save the one where it has failed: that one does so by itself."""
        if self._state is _State.RUNNING:
            self._send(EndCall(number), but=failed)
            if len(self._machines) > 1:
                self._state = _State.COMPARING
        elif self._state is _State.OVER and failed is None:
            self._unsaid, self._printed = CallOver(number), {}  # at once

    def _take_from_agent(self, machine: Machine, record: AgentSays, content: int) -> None:
        if isinstance(record, CallOver):
            self._take_back(machine)
        elif isinstance(record, RanksBack | RanksStand):
            self._told |= payload.read(content)
            if isinstance(record, RanksBack):
                self._complete.add(machine.number)
            self._here |= set(machine.ranks if isinstance(record, RanksBack) else record.back)
            self._compare()
        else:
            super()._take_from_agent(machine, record, content)
            failed = isinstance(record, RankAnswered) and record.kind is not AnswerKind.VALUE
            if failed or isinstance(record, DeadlinePassed):
                self._end_call(self._number, machine)
            elif isinstance(record, RankGone | Reaped) and not self._leaving:
                self._cancel()

    def _take_back(self, machine: Machine) -> None:
        """Takes in that the call is over on a machine; before it has failed on another one, that is too early."""
        if self._state is _State.COMPARING:
            return
        self._back.add(machine.number)
        if len(self._back) == len(self._machines):
            self._state = _State.OVER
            self._stop.end_call()
            # Not told yet: the handle would show the call's last lines in the next one's cell.
            self._unsaid, self._printed = CallOver(self._number), self._backlog.ends()

    def _compare(self) -> None:
        # Decided here, since a rank that is alone behind may be on another machine; the gate, which knows all
        # machines, too, would have to learn what a call is.
        complete = len(self._complete) == len(self._machines)
        if complete and in_step.agree([numbers for _, numbers in sorted(self._told.items())]):
            self._back.clear()
            self._state = _State.MEETING
            self._send(MeetAgain(self._number))
        elif complete:
            self._cancel()
        elif in_step.is_lost(self._told, self._here):
            self._end_those_inside()

    def _end_those_inside(self) -> None:
        """Ends the ranks that wait in vain; all others later, as their end would break what these are asked about."""
        for machine in self._open.values():
            if machine.number not in self._complete:
                machine.stream.send(Cancel())

    def _cancel(self) -> None:
        self._leaving = True
        super()._cancel()

    def _step(self) -> None:
        super()._step()
        if self._unsaid is not None and (self._told or self._backlog.is_past(self._printed)):
            self._tell(self._unsaid)
            self._unsaid = None
