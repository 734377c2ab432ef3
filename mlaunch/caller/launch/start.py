"""The start of a launch: the one way from a plan to a handle, for functions and commands."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlaunch.base.exceptions import is_misuse, misuse
from mlaunch.caller import interrupts
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.history import History
from mlaunch.caller.server.attachments import in_memfds
from mlaunch.caller.server.fork_server import ForkServer, ServerGoneError
from mlaunch.caller.server.prepared_launch import preparation
from mlaunch.protocol import calls, explain, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec, details_of

if TYPE_CHECKING:
    from mlaunch.core.records import Grant
    from mlaunch.protocol.messages import AgentsEnd, LaunchersEnd


def start(
    grant: Grant, server: ForkServer, spec: LaunchSpec, call: Call, output: OutputPlan, history: History
) -> LaunchHandle:
    """Start an attempt at a call: if possible in the launch that a server which stays has prepared.

    In any case the next launch is to be prepared; after one that holds something, only if others wait for the same.

    Raises:
        ServerGoneError: The fork server is gone; nothing was started.
        TypeError: The function or an argument cannot be pickled.
    """
    if grant.options.start_method == "fork":  # the ranks have the call in memory
        return start_launch(server, spec, None, output, history, grant.held)
    sent = Call(calls.portable(call.function), call.args, call.kwargs)
    held = grant.held
    if grant.options.start_method != "forkserver" or (held and spec.devices.type != "cpu"):
        # One on devices would seldom be on those that are free next.
        return start_launch(server, spec, sent, output, history, held)
    spec = with_pipes(spec, output)
    agent = preparation.take(server, spec)
    if prepared := agent is not None:
        _send_call(server, agent, spec, sent, held)
    following = preparation.expect(server, spec) if grant.more or not held else None
    try:
        if agent is None:
            more = spec.cluster is None
            agent = send_launch(server, spec, sent, following, more=more, held=held)
        elif following is not None:
            with contextlib.suppress(OSError):  # the agent is gone, which the launch itself will report
                server.prepare(following, soon=bool(held))
    finally:
        # The server has its copy; with ours open, a dead agent's channel would never be at its end.
        if following is not None:
            following.close()
    return _handle(server, spec, agent, output, history, prepared=prepared)


def start_launch(
    server: ForkServer,
    spec: LaunchSpec,
    call: Call | None,
    output: OutputPlan,
    history: History,
    held: Sequence[int] = (),
) -> LaunchHandle:
    """Start a launch of its own, with the errors of ``start``. ``call`` is None if ranks have it, or run a command.

    ``held``: further descriptors that its processes must hold.
    """
    spec = with_pipes(spec, output)
    return _handle(server, spec, send_launch(server, spec, call, held=held), output, history)


def _handle(
    server: ForkServer,
    spec: LaunchSpec,
    agent: LaunchersEnd,
    output: OutputPlan,
    history: History,
    *,
    prepared: bool = False,
) -> LaunchHandle:
    kind = LaunchHandle
    if spec.sections:
        from mlaunch.core.load import handle_of  # most launches do not need it

        kind = handle_of(spec.sections, LaunchHandle)
    relay = Relay(output, spec.local_world_size, spec.restarts.count)
    return kind(spec, server, agent, relay, history, prepared=prepared)


def _send_call(server: ForkServer, agent: LaunchersEnd, spec: LaunchSpec, call: Call, held: Sequence[int]) -> None:
    """Give a prepared launch its call. An agent that is gone has begun nothing, which is found out later."""
    try:
        with in_memfds([("call", call)]) as memfds:
            agent.try_send(details_of(spec, len(held)), [*memfds, *held])
    except BaseException as error:
        agent.close()
        name_culprit(error, call, spec.call.name)
        raise
    server.adopt(agent)


def with_pipes(spec: LaunchSpec, output: OutputPlan) -> LaunchSpec:
    """Return the launch with the pipes for the plan of its output, and with what ranks need for these."""
    sections = spec.sections if output.rich is None else {**spec.sections, **output.rich.SECTIONS}
    return dataclasses.replace(spec, piped=output.piped(spec.local_world_size), sections=sections)


def send_launch(
    server: ForkServer,
    spec: LaunchSpec,
    call: Call | None,
    following: AgentsEnd | None = None,
    *,
    more: bool = False,
    held: Sequence[int] = (),
) -> LaunchersEnd:
    """Ask the fork server to start a launch; return the channel to its agent. Raises what ``start_launch`` does."""
    try:
        return server.launch(spec, call, following, more=more, held=held)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ServerGoneError(f"{server.describe_end()} before it could start {spec.call.name}") from error
    except Exception as error:
        name_culprit(error, call, spec.call.name)
        raise


def name_culprit(error: BaseException, call: Call | None, name: str) -> None:
    """Raise the TypeError that names what in the call cannot be pickled, if that is the cause of ``error``."""
    if not isinstance(error, Exception) or isinstance(error, OSError):  # the system's doing, not the call's
        return
    if call is not None and not is_misuse(error) and not interrupts.by_handler(error):
        raise unpicklable_call(call, name, error) from explain.below_the_pickler(error)


def unpicklable_call(call: Call, name: str, error: Exception) -> Exception:
    """Return the TypeError that says which part of a call cannot be pickled."""
    found, culprit = _culprit(call, name)
    return misuse(TypeError(f"{found} cannot be pickled{explain.reason(error)}{explain.instead_to_pass(culprit)}"))


def _culprit(call: Call, name: str) -> tuple[str, object]:
    """Return the part of a call that cannot be pickled, with its name first."""
    parts: list[tuple[str, object]] = [(f"argument {i} of {name}", arg) for i, arg in enumerate(call.args)]
    parts += [(f"argument {key!r} of {name}", value) for key, value in call.kwargs.items()]
    # Found afterwards, part by part: to look at each argument before would pickle all of them twice.
    for where, value in [*parts, (f"{name}", call.function)]:
        try:
            payload.check(value)
        except Exception:  # whatever a __reduce__ may raise
            found, culprit = explain.culprit(value, where)
            return f"{found}, which", culprit
    return f"the call of {name}", call
