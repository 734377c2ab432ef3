"""Ranks that stay on the machines of an engine: how they start, and their agents merged into one.

    over --NextCall--> running --all have come back--> over
    running --failure, deadline, end--> comparing (once all have come back) --they agree--> meeting --> over

If a call fails on a machine, the agent there ends it for its own ranks, and the other agents are asked to do the same.
All ranks' numbers come here, since only a comparison of all shows whether they are in step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlaunch.caller import interrupts
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan
from mlaunch.caller.output.relay import Relay
from mlaunch.engines.caller.engine_launch import AllServers, MachinesLaunch, Work, with_hosts
from mlaunch.engines.caller.machines import Machine, PlacedMachines
from mlaunch.engines.caller.machines_requests import MachinesInspection
from mlaunch.engines.caller.merged_agent import EndOf, MergedAgent, Patience
from mlaunch.engines.wire import Offer
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
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import in_step
from mlaunch.ranks.caller.kept_handle import KeptHandle
from mlaunch.ranks.caller.ranks_launch import RanksLaunch, StayRules


class _State(enum.Enum):
    OVER = enum.auto()
    RUNNING = enum.auto()
    COMPARING = enum.auto()
    MEETING = enum.auto()


class KeptAgents(MergedAgent):
    """The agents of one set of ranks, which run one call after the other."""

    def __init__(
        self,
        machines: Sequence[Machine],
        world_size: int,
        end_of: EndOf,
        times: Patience,
        inspection: MachinesInspection,
    ) -> None:
        super().__init__(machines, world_size, end_of, times, inspection)
        self._number = 0  # of the call
        self._state = _State.OVER
        self._back: set[int] = set()  # numbers of the machines on which it is over
        self._told: dict[int, in_step.Numbers] = {}  # by rank, the operations that it has entered
        self._here: set[int] = set()  # ranks that are back
        self._complete: set[int] = set()  # numbers of the machines all of whose ranks are back
        self._unsaid: CallOver | None = None  # kept until the ranks' earlier output is on its way
        self._printed: dict[tuple[int, int], int] = {}  # where that output ends
        self._leaving = False  # the ranks were asked to end, or to stop

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
        """Make the machines end the call, except ``failed``, where it has failed: that one ends it by itself."""
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
        """Note that the call is over on a machine. Ignored once the call has failed on another one."""
        if self._state is _State.COMPARING:
            return
        self._back.add(machine.number)
        if len(self._back) == len(self._machines):
            self._state = _State.OVER
            self._stop.end_call()
            # Not at once: the handle would show the call's last lines in the cell of the next one.
            self._unsaid, self._printed = CallOver(self._number), self._backlog.ends()

    def _compare(self) -> None:
        # Decided here, since the rank that is behind may be on any machine. The gate, which also knows all machines,
        # would have to know what a call is.
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
        """End the ranks that are still inside the call. Ending the others now would break the comparison."""
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


class _Servers(AllServers):
    """The machines of ranks that stay, and the thread that listens. ``after``: called when the ranks have ended."""

    def __init__(self, machines: PlacedMachines, merged: MergedAgent, after: Callable[[], None]) -> None:
        super().__init__(machines, merged)
        self._after = after

    def ended(self) -> bool:
        return False  # a lost machine has a report of its own

    def close(self) -> None:
        super().close()
        self._after()


@dataclass
class _KeptMachinesHandle(KeptHandle):
    """The handle of KeptAgents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_begun = True
        self.outcome.hosts = self.history.hosts

    def end_call(self, interrupt: BaseException) -> None:
        if self.history.started:
            super().end_call(interrupt)
        else:  # it may take as long as the machines need to find each other; nothing is lost
            self.outcome.interrupted_by(interrupt)
            self.cancel(force=False)

    def adapt_output(self, plan: OutputPlan) -> OutputPlan:
        return with_hosts(plan, self.history.hosts)

    def _turn(self, plan: OutputPlan, spec: LaunchSpec) -> None:
        super()._turn(plan, spec)
        self.outcome.hosts = self.history.hosts


class _RanksLaunch(MachinesLaunch):
    """A launch on machines whose ranks stay, and start without a call."""

    def start(self, after: Callable[[], None]) -> _KeptMachinesHandle:
        spec, history = self._begin()
        merged = self._merged(KeptAgents, spec, None)
        plan = self.output(spec, history.hosts)
        servers = _Servers(self.placed, merged, after)
        handle = _KeptMachinesHandle(
            spec, servers, merged.channel, Relay(plan, spec.world_size, 0, ends_come=True), history
        )
        handle.seen_as = merged.inspection.launch.launch_id
        merged.start()
        return handle

    def _spec(self, offers: Sequence[Offer]) -> LaunchSpec:
        spec = super()._spec(offers)
        return replace(spec.called(name=f"Ranks ({spec.world_size})", deadline=None), stays=True)


def open_on_machines(
    machines: PlacedMachines, options: Options, rules: StayRules, after: Callable[[], None]
) -> RanksLaunch:
    """Start ranks that stay on these machines; do not wait for them. ``after``: called when they have ended.

    Raises:
        LaunchError: The engine does not give the machines, or one of them cannot give what is asked for.
    """

    def output(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        return with_hosts(output_plan(options.replaced({"log_dir": None}), spec), hosts)

    with interrupts.deferred():
        machines.renew()
        handle = _RanksLaunch(machines, options, Work("Ranks", None), output, Attempt(0, None)).start(after)
        return RanksLaunch(handle, rules, own_server=True)
