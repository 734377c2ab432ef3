"""Some machines of an allocation, on which one launch of several runs, or ranks stay that those launches take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mlaunch.caller.launch.plan import Attempt
from mlaunch.engines.launch.engine_call import call_on_machines
from mlaunch.engines.launch.engine_launch import MachinesLaunch, StartedLaunch, Work, with_hosts
from mlaunch.engines.launch.machine import Machine
from mlaunch.engines.launch.machines import Machines
from mlaunch.engines.launch.placed_machines import PlacedMachines
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.caller.output.output_plan import OutputPlan
    from mlaunch.caller.ranks.session import RanksLaunch
    from mlaunch.caller.ranks.stay_rules import StayRules
    from mlaunch.protocol.spec import LaunchSpec


class Holds(Protocol):
    """The allocation to which they belong."""

    def open_on_part(self, part: HeldPart, options: Options, rules: StayRules) -> RanksLaunch:
        """Starts ranks that stay there."""

    def make_room(self, machines: Sequence[Machine]) -> None:
        """Ends ranks that stay on some of these machines."""


class HeldPart(PlacedMachines):
    """Machines of one launch at a time, which has claimed them. For ``engine=`` and ``keep=`` an engine of its own."""

    def __init__(self, holder: Holds, whole: Machines, machines: Sequence[Machine]) -> None:
        super().__init__(whole.n_gpus, whole.lease)
        self._holder = holder
        self.placement = whole.placement
        self.machines = list(machines)

    def start(
        self, options: Options, call: Call, name: str, number: Attempt, output: Callable[[LaunchSpec], OutputPlan]
    ) -> StartedLaunch:
        """Starts a launch there, and waits until the machines have said that they can.

        Raises:
            LaunchError: One of them cannot, or was lost meanwhile.
        """

        def plan(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
            return with_hosts(output(spec), hosts)

        # Ranks of keep= stay there between trials, and would share the devices.
        self._holder.make_room(self.machines)
        work = Work(name, Call(calls.portable(call.function), call.args, call.kwargs))
        return MachinesLaunch(self, options, work, plan, number).start_it()

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Runs a function on these machines; see ``call_on_machines``."""
        return call_on_machines(self, options, function, args, kwargs)

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Starts ranks that stay on these machines."""
        return self._holder.open_on_part(self, options, rules)

    def __repr__(self) -> str:
        return f"<machines of an allocation: {', '.join(self.hosts)}>"
