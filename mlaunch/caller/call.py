"""One call in the caller's process: plan it, start it, and again if it fails and may; collect."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlaunch.base.errors import LaunchError, warn_caller
from mlaunch.caller import fork_server
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.handle import Launch
from mlaunch.caller.options import Options
from mlaunch.caller.output.options import new_directory, plan_of
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.plan import plan
from mlaunch.caller.report.history import History
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.restarts import with_restarts
from mlaunch.caller.warm import warm_server
from mlaunch.protocol import calls, payload, pickling
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import LaunchSpec


def call_on_ranks(
    options: Options,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    remember: Callable[[LaunchReport], None],
) -> list[Any]:
    """Runs the function once per device; the list of what this machine's ranks returned.

    ``remember`` gets the report of each attempt, before the values are returned or an exception is raised.
    """
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    call = Call(function, args, kwargs)
    log_dir = new_directory(options.log_dir, name)
    flush_streams()  # what was printed before the call stands before what the ranks print

    def attempt(deadline: float | None, restart_count: int) -> list[Any]:
        return _attempt(
            options.replaced({"deadline": deadline, "log_dir": log_dir}), call, name, restart_count, remember
        )

    return with_restarts(attempt, name, options.deadline, options.max_restarts, warn_caller)


def _attempt(
    options: Options, call: Call, name: str, restart_count: int, remember: Callable[[LaunchReport], None]
) -> list[Any]:
    history = History()
    environ = {**os.environ, **(options.env or {})}
    server = _server(options, call, environ)
    try:  # not a context manager of contextlib's, which would set attributes of what passes through it
        spec = plan(options, server, name, environ, restart_count)
        history.ready = time.monotonic()
        output = plan_of(options, spec)
        spec = dataclasses.replace(spec, piped=output.piped(spec.local_size))
        sent = None if options.start_method == "fork" else Call(calls.portable(call.function), call.args, call.kwargs)
        relay = Relay(output, spec.local_size, restart_count)
        launch = Launch(spec, server, _start(server, spec, sent, name), relay, history)
        try:
            return launch.collect()
        finally:
            remember(launch.report())
            launch.close()
    finally:
        if options.start_method != "forkserver":
            server.close()


def _server(options: Options, call: Call, environ: Mapping[str, str]) -> ForkServer:
    if options.start_method == "forkserver":
        return warm_server.get(environ)
    return fork_server.start_fork(call) if options.start_method == "fork" else fork_server.start_interpreter(environ)


def _start(server: ForkServer, spec: LaunchSpec, call: Call | None, name: str) -> Channel:
    try:
        return server.launch(spec, call)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise LaunchError(f"{server.epitaph()} before it could start {name}") from error
    except OSError:  # no file descriptor, no memory: not the call's fault
        raise
    except Exception as error:  # whatever a __reduce__ may raise
        if call is None:
            raise
        raise TypeError(f"{_culprit(call, name)} cannot be pickled ({error})") from error


def _culprit(call: Call, name: str) -> str:
    parts: list[tuple[str, object]] = [(f"argument {i} of {name}", arg) for i, arg in enumerate(call.args)]
    parts += [(f"argument {key!r} of {name}", value) for key, value in call.kwargs.items()]
    for where, value in [*parts, (f"{name}", call.function)]:
        try:
            payload.check(value)
        except Exception:  # whatever a __reduce__ may raise
            return pickling.unpicklable(value, where) + ", which"
    return f"the call of {name}"


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, full, closed
            stream.flush()
