"""One call on the machines of an engine: as ``caller/launch/call.py`` does it on this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlaunch.base.exceptions import LaunchTimeout, report_of
from mlaunch.caller import interrupts
from mlaunch.caller.launch.call import flush_streams
from mlaunch.caller.launch.restarts import with_restarts
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_options import new_directory, output_plan
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.stop_order import StopOrder
from mlaunch.caller.warn import warn_caller
from mlaunch.engines.launch.engine_launch import MachinesLaunch, Work, with_hosts
from mlaunch.engines.launch.machines import Machines
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec

MakesPlan = Callable[[LaunchSpec, dict[int, str]], OutputPlan]


def call_on_machines(
    machines: Machines, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Ended:
    """Runs the function on every machine's ranks; returns how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    work = Work(name, Call(calls.portable(function), args, kwargs))
    log_dir = new_directory(options.log_dir, name)
    flush_streams()
    if log_dir is not None:
        options = options.replaced({"log_dir": log_dir})

    def output(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        return with_hosts(output_plan(options, spec), hosts)

    order = StopOrder(options.stop_on)
    with order, interrupts.deferred():
        return _Attempts(machines, options, work, output, order).run()


class _Attempts:
    """The attempts of a call. Those that fail are counted apart from those whose machines were taken."""

    def __init__(self, machines: Machines, options: Options, work: Work, output: MakesPlan, order: StopOrder) -> None:
        self._machines, self._options, self._work, self._output = machines, options, work, output
        self._order = order
        self._begun = 0  # attempts
        self._preempted = False  # the machines of the last one were taken

    def run(self) -> Ended:
        """Returns how the last one ended."""
        begun, left = time.monotonic(), self._options.deadline
        for number in range(self._options.max_preemptions + 1):
            again = left, self._options.max_restarts
            ended = with_restarts(self._attempt, self._work.name, *again, warn_caller, self._is_to_stop)
            if not self._preempted or number == self._options.max_preemptions:
                break
            count = f"preemption {number + 1} of at most {self._options.max_preemptions}"
            warn_caller(f"{self._work.name} starts anew on other machines ({count}): the scheduler has taken these")
            self._machines.close()
            if self._options.deadline is not None:
                left = max(0.0, self._options.deadline - (time.monotonic() - begun))
        return ended

    def _is_to_stop(self) -> bool:
        return self._preempted or bool(self._order.reason)

    def _attempt(self, time_left: float | None, _failed: int) -> Ended:
        self._machines.renew()
        made = MachinesLaunch(self._machines, self._options, self._work, self._output, self._begun, time_left)
        self._begun += 1
        ended = made.run(self._order)
        self._preempted = self._may_start_anew(ended) and self._machines.preempted()
        return ended

    def _may_start_anew(self, ended: Ended) -> bool:
        """Tells whether it was stopped, or has failed, though nobody here has asked for its end."""
        if not self._options.max_preemptions or self._order.reason:
            return False
        stopped = ended.report().stopped
        if ended.error is None:
            return stopped is not None and stopped.reason != "asked"
        report = report_of(ended.error) if isinstance(ended.error, Exception) else None
        return report is not None and not isinstance(report, LaunchTimeout)
