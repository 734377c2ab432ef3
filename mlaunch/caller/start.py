"""Starts a launch: the one way from a plan to a handle, for functions and commands."""

from __future__ import annotations

import dataclasses

from mlaunch.base.errors import LaunchError
from mlaunch.base.misuse import is_misuse, misuse
from mlaunch.caller import interrupts
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.handle import LaunchHandle
from mlaunch.caller.output.plan import OutputPlan
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.history import History
from mlaunch.protocol import explain, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import LaunchSpec


class ServerGoneError(LaunchError):
    """The fork server was gone before it could start a launch."""


def start_launch(
    server: ForkServer, spec: LaunchSpec, call: Call | None, output: OutputPlan, history: History
) -> LaunchHandle:
    """Sends the launch to the fork server. ``call`` None: the ranks have it in memory, or run a command.

    Raises:
        ServerGoneError: The fork server is gone.
        TypeError: The function or an argument cannot be pickled.
    """
    spec = with_pipes(spec, output)
    agent = send_launch(server, spec, call)
    return LaunchHandle(spec, server, agent, Relay(output, spec.local_world_size, spec.restart_count), history)


def with_pipes(spec: LaunchSpec, output: OutputPlan) -> LaunchSpec:
    """Returns the launch with the pipes that the plan for its output wants."""
    return dataclasses.replace(spec, piped=output.piped(spec.local_world_size))


def send_launch(server: ForkServer, spec: LaunchSpec, call: Call | None) -> Channel:
    """Has the fork server start it; returns the channel to its agent. Raises what ``start_launch`` does."""
    try:
        return server.launch(spec, call)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ServerGoneError(f"{server.describe_end()} before it could start {spec.name}") from error
    except OSError:  # no file descriptor, no memory: not the call's fault
        raise
    except Exception as error:  # whatever a __reduce__ may raise
        if call is None or is_misuse(error) or interrupts.by_handler(error):
            raise
        raise unpicklable_call(call, spec.name, error) from explain.below_the_pickler(error)


def unpicklable_call(call: Call, name: str, error: Exception) -> Exception:
    """Returns the TypeError that says which part of a call cannot be pickled."""
    return misuse(TypeError(f"{_culprit(call, name)} cannot be pickled ({error})"))


def _culprit(call: Call, name: str) -> str:
    """Says which part of a call cannot be pickled."""
    parts: list[tuple[str, object]] = [(f"argument {i} of {name}", arg) for i, arg in enumerate(call.args)]
    parts += [(f"argument {key!r} of {name}", value) for key, value in call.kwargs.items()]
    for where, value in [*parts, (f"{name}", call.function)]:
        try:
            payload.check(value)
        except Exception:  # whatever a __reduce__ may raise
            return explain.unpicklable(value, where) + ", which"
    return f"the call of {name}"
