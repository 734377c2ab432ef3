"""What held machines have to be for launches that go on by themselves: types for what is defined in rooms above."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlaunch.caller.options.call_targets import PlacesRanks

if TYPE_CHECKING:
    from mlaunch.caller.launch.handle import LaunchHandle
    from mlaunch.caller.launch.plan import Attempt
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.caller.output.output_plan import OutputPlan
    from mlaunch.protocol.calls import Call
    from mlaunch.protocol.spec import LaunchSpec


class HoldsMachines(PlacesRanks, Protocol):
    """Machines that an engine holds, which launches share."""

    def check_trial(self, machines: int | None) -> None:
        """Raises ValueError for a number of machines that no launch can have."""

    def claim(self, machines: int | None, notify: Callable[[], None], end: Callable[[], None]) -> ClaimsMachines:
        """Gets in line for so many of them. ``notify`` is called when it may be our turn, ``end`` to end the launch."""


class ClaimsMachines(Protocol):
    """A place in that line, and what a launch has of it."""

    def take(self) -> bool:
        """Tells whether it has its machines now."""

    def part(self) -> StartsLaunches:
        """Returns the machines, once they are ready; may wait."""

    @property
    def lost(self) -> bool:
        """Whether one of them is lost."""

    def close(self) -> None:
        """Gives them to others."""


class StartsLaunches(PlacesRanks, Protocol):
    """Machines that one launch has for itself; as ``engine=``, for ranks that stay."""

    def start(
        self, options: Options, call: Call, name: str, number: Attempt, output: Callable[[LaunchSpec], OutputPlan]
    ) -> LaunchElsewhere:
        """Starts a launch there; may wait."""


class LaunchElsewhere(Protocol):
    """A launch on other machines. ``close``: is called after its handle was closed; may wait."""

    @property
    def handle(self) -> LaunchHandle: ...

    @property
    def close(self) -> Callable[[], None]: ...
