"""One call on the machines of an engine, as in ``caller/launch/call.py`` on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from mlaunch.base.exceptions import LaunchTimeout, report_of
from mlaunch.caller.launch.call import flush_streams, with_parts
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.launch.restarts import with_restarts
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, with_directory
from mlaunch.caller.warn import warn_caller
from mlaunch.core.load import CallerParts
from mlaunch.engines.caller.launch.engine_launch import MachinesLaunch, MakesPlan, Work, with_hosts
from mlaunch.engines.caller.launch.machines import PlacedMachines
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec


class Attempts:
    """The attempts of one call, or of a command. ``tell``: gets the reason for another attempt.

    Failed attempts, and attempts whose machines were preempted, are counted separately.
    """

    def __init__(
        self, machines: PlacedMachines, options: Options, work: Work, output: MakesPlan, tell: Callable[[str], None]
    ) -> None:
        self._machines, self._options, self._work, self._output = machines, options, work, output
        self._tell = tell
        self._begun = 0  # attempts
        self._preempted = False  # the machines of the last one were taken

    def steps(self, parts: CallerParts, most: int) -> Steps:
        """Return how the last attempt ended. ``most``: how often preempted machines may be replaced."""
        self._parts, self._most = parts, most
        begun, left = time.monotonic(), self._options.deadline
        for number in range(most + 1):
            again = left, self._options.max_restarts, self._tell
            ended = yield from with_restarts(self._attempt, self._work.name, *again, parts, lambda: self._preempted)
            if not self._preempted or number == most:
                break
            count = f"preemption {number + 1} of at most {most}"
            self._tell(f"{self._work.name} starts again on other machines ({count}): the scheduler has taken these")
            # All of them: the other machines of a preempted job end with it.
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
        """True if the attempt was stopped or has failed, and nobody here has asked for its end."""
        if not self._most or self._parts.is_last():
            return False
        stopped = ended.report().stopped
        if ended.error is None:
            return stopped is not None and stopped.reason != "asked"
        report = report_of(ended.error) if isinstance(ended.error, Exception) else None
        return report is not None and not isinstance(report, LaunchTimeout)


def call_on_machines(
    machines: PlacedMachines,
    options: Options,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Ended:
    """Run the function on the ranks of all machines; return how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    work = Work(name, Call(calls.portable(function), args, kwargs))
    options = with_directory(options, name)
    # So that this process's earlier output comes before the ranks'.
    flush_streams()

    def output(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        return with_hosts(output_plan(options, spec), hosts)

    attempts = Attempts(machines, options, work, output, warn_caller)
    return with_parts(options, lambda parts: attempts.steps(parts, options.max_preemptions))
