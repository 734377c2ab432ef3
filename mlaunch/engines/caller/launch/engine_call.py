"""One call on the machines of an engine: as ``caller/launch/call.py`` does it on this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlaunch.caller.launch.call import flush_streams, with_parts
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, with_directory
from mlaunch.caller.warn import warn_caller
from mlaunch.engines.caller.launch.attempts import Attempts
from mlaunch.engines.caller.launch.engine_launch import Work, with_hosts
from mlaunch.engines.caller.launch.placed_machines import PlacedMachines
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec


def call_on_machines(
    machines: PlacedMachines,
    options: Options,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Ended:
    """Runs the function on every machine's ranks; returns how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    work = Work(name, Call(calls.portable(function), args, kwargs))
    options = with_directory(options, name)
    # What this process has printed before the call comes before what the ranks print.
    flush_streams()

    def output(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        return with_hosts(output_plan(options, spec), hosts)

    attempts = Attempts(machines, options, work, output, warn_caller)
    return with_parts(options, lambda parts: attempts.steps(parts, options.max_preemptions))
