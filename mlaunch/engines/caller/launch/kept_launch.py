"""Ranks that stay on the machines of an engine: how they are started, and their launch as its caller drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlaunch.caller import interrupts
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.ranks.kept_handle import KeptHandle
from mlaunch.caller.ranks.ranks_launch import RanksLaunch, StayRules
from mlaunch.engines.caller.launch.agents_of_machines import MergedAgent
from mlaunch.engines.caller.launch.engine_launch import END_TIMEOUT, AllServers, MachinesLaunch, Work, with_hosts
from mlaunch.engines.caller.launch.kept_agents import KeptAgents
from mlaunch.engines.caller.launch.placed_machines import PlacedMachines
from mlaunch.engines.caller.launch.timeouts import Patience
from mlaunch.engines.wire.member_messages import Offer
from mlaunch.protocol.spec import LaunchSpec


class _Servers(AllServers):
    """What is behind ranks that stay. ``after``: called when they have ended."""

    def __init__(self, machines: PlacedMachines, merged: MergedAgent, after: Callable[[], None]) -> None:
        super().__init__(machines, merged)
        self._after = after

    def ended(self) -> bool:
        return False  # if a machine is lost, that is told by itself

    def close(self) -> None:
        super().close()
        self._after()


@dataclass
class _KeptMachinesHandle(KeptHandle):
    """Hears KeptAgents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_begun = True
        self.outcome.hosts = self.history.hosts

    def end_call(self, interrupt: BaseException) -> None:
        if self.history.started:
            super().end_call(interrupt)
        else:  # which may take as long as the machines need to find each other, and nothing is lost
            self.outcome.interrupted_by(interrupt)
            self.cancel(force=False)

    def adapt_output(self, plan: OutputPlan) -> OutputPlan:
        return with_hosts(plan, self.history.hosts)

    def _turn(self, plan: OutputPlan, spec: LaunchSpec) -> None:
        super()._turn(plan, spec)
        self.outcome.hosts = self.history.hosts


class _RanksLaunch(MachinesLaunch):
    """A launch without a call."""

    def start(self, after: Callable[[], None]) -> _KeptMachinesHandle:
        spec, history = self._begin()
        merged = self._merged(KeptAgents, spec, Patience(spec.grace_period + END_TIMEOUT, None, self.placed.lease))
        plan = self.output(spec, history.hosts)
        servers = _Servers(self.placed, merged, after)
        handle = _KeptMachinesHandle(
            spec, servers, merged.channel, Relay(plan, spec.world_size, 0, ends_come=True), history
        )
        handle.seen_as = merged.lookout.launch.launch_id
        merged.start()
        return handle

    def _spec(self, prepared: Sequence[Offer]) -> LaunchSpec:
        spec = super()._spec(prepared)
        return replace(spec.called(name=f"Ranks ({spec.world_size})", deadline=None), stays=True)


def open_on_machines(
    machines: PlacedMachines, options: Options, rules: StayRules, after: Callable[[], None]
) -> RanksLaunch:
    """Starts ranks that stay there; does not wait for them. ``after``: called when they have ended.

    Raises:
        LaunchError: The engine does not give the machines, or one of them cannot give what is asked for.
    """

    def output(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        return with_hosts(output_plan(options.replaced({"log_dir": None}), spec), hosts)

    with interrupts.deferred():
        machines.renew()
        handle = _RanksLaunch(machines, options, Work("Ranks", None), output, Attempt(0, None)).start(after)
        return RanksLaunch(handle, rules, own_server=True)
