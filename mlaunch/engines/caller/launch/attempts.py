"""The attempts of a call on an engine's machines, or of a command there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from mlaunch.base.exceptions import LaunchTimeout, report_of
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.launch.restarts import with_restarts
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.caller.options.launch_options import Options
from mlaunch.core.load import CallerParts
from mlaunch.engines.caller.launch.engine_launch import MachinesLaunch, MakesPlan, Work
from mlaunch.engines.caller.launch.placed_machines import PlacedMachines


class Attempts:
    """Those that fail are counted apart from those whose machines were taken. ``tell``: gets why there is another."""

    def __init__(
        self, machines: PlacedMachines, options: Options, work: Work, output: MakesPlan, tell: Callable[[str], None]
    ) -> None:
        self._machines, self._options, self._work, self._output = machines, options, work, output
        self._tell = tell
        self._begun = 0  # attempts
        self._preempted = False  # the machines of the last one were taken

    def steps(self, parts: CallerParts, most: int) -> Steps:
        """Return how the last one ended. ``most``: how often machines may be taken, and it starts anew on others."""
        self._parts, self._most = parts, most
        begun, left = time.monotonic(), self._options.deadline
        for number in range(most + 1):
            again = left, self._options.max_restarts, self._tell
            ended = yield from with_restarts(self._attempt, self._work.name, *again, parts, lambda: self._preempted)
            if not self._preempted or number == most:
                break
            count = f"preemption {number + 1} of at most {most}"
            self._tell(f"{self._work.name} starts anew on other machines ({count}): the scheduler has taken these")
            # All of them: machines that are left of a preempted job end with it.
            self._machines.close()
            if self._options.deadline is not None:
                left = max(0.0, self._options.deadline - (time.monotonic() - begun))
        return ended

    def _attempt(self, number: Attempt) -> Steps:
        self._machines.renew()
        number = dataclasses.replace(number, restart_count=self._begun)
        made = MachinesLaunch(self._machines, self._options, self._work, self._output, number)
        self._begun += 1
        ended = yield from made.steps()
        self._preempted = self._may_start_anew(ended) and self._machines.preempted()
        return ended

    def _may_start_anew(self, ended: Ended) -> bool:
        """Tells whether it was stopped, or has failed, though nobody here has asked for its end."""
        if not self._most or self._parts.is_last():
            return False
        stopped = ended.report().stopped
        if ended.error is None:
            return stopped is not None and stopped.reason != "asked"
        report = report_of(ended.error) if isinstance(ended.error, Exception) else None
        return report is not None and not isinstance(report, LaunchTimeout)
