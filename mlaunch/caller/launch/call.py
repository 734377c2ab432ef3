"""One call of a decorated function, in the caller's process: plan it, start it, and again if it fails and may.

call_on_ranks
  +-> attempt: server ready -> devices leased -> planned -> started -> LaunchHandle.wait -> Ended
         ^         |                                            |
         +---------+  the server was gone before anything ran   |  (TRIES times)
         +------------------------------------------------------+  a rank failed (max_restarts times)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlaunch.base import rlimits
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.misuse import misuse
from mlaunch.caller import interrupts
from mlaunch.caller.launch import hints
from mlaunch.caller.launch.call_trace import CallTrace
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.plan import Attempt, ThisMachine, check_profile_ranks, plan
from mlaunch.caller.launch.restarts import with_restarts
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.launch.start import start_launch, start_or_take
from mlaunch.caller.leasing import Grant, leased
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_options import new_directory, output_plan, place_of
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.output.starting import StartingLine
from mlaunch.caller.report.history import History
from mlaunch.caller.server import start_server
from mlaunch.caller.server.fork_server import ForkServer, ServerGoneError
from mlaunch.caller.server.warm import warm_server
from mlaunch.caller.stop_order import StopOrder
from mlaunch.caller.warn import warn_caller
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec

# A warm server that is killed just before the call still looks alive, and so does a prepared launch.
TRIES = 3


def call_on_ranks(
    options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Ended:
    """Runs the function once per device; returns how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    call = Call(function, args, kwargs)
    if options.debug:
        options = _debugged(options, name)
    log_dir = new_directory(options.log_dir, name)
    flush_streams()  # what was printed before the call stands before what the ranks print

    if log_dir is not None:
        options = options.replaced({"log_dir": log_dir})

    order = StopOrder(options.stop_on)

    def attempt(time_left: float | None, restart_count: int) -> Ended:
        return _attempt(options, call, name, Attempt(restart_count, time_left, trace.order), order)

    try:
        # Python runs signal handlers between any two steps, also between receiving a descriptor and keeping it: of
        # 400 interrupts within the first 12 ms of a call some leaked descriptors, and one lost the fork server's
        # first word.
        with order, interrupts.deferred(), CallTrace(options) as trace:
            again = options.deadline, options.max_restarts
            ended = with_restarts(attempt, name, *again, warn_caller, lambda: order.reason)
            if trace.order is not None:
                with interrupts.allowed():  # it may take long
                    trace.finish(ended, warn_caller)
            return ended
    except OSError as error:
        rlimits.name_limit(error)
        raise


def _debugged(options: Options, name: str) -> Options:
    """Returns the options without clocks, which would count while somebody reads. ValueError: there is nobody."""
    if options.debug is True:
        from mlaunch.caller.debugging import asking  # for this alone

        asking.check_place(name)
    elif importlib.util.find_spec("debugpy") is None:
        raise misuse(ModuleNotFoundError(f"debug={options.debug!r} for {name} needs debugpy (extra: debug)"))
    deadline = options.deadline if options.debug is True else None  # it is held while there is a prompt
    return options.replaced({"timeout": None, "deadline": deadline, "stall": None})


def _attempt(options: Options, call: Call, name: str, number: Attempt, order: StopOrder) -> Ended:
    left = TRIES
    while True:
        left -= 1
        try:
            return _try(options, call, name, number, order)
        except ServerGoneError as error:
            if options.start_method != "forkserver":  # then the server was this call's own
                raise
            if not left:
                raise LaunchError(
                    f"{error}; {TRIES - 1} others before it met the same end. Look for what kills them: the kernel, "
                    f"for want of memory (dmesg), or a limit of this machine"
                ) from error


def _try(options: Options, call: Call, name: str, number: Attempt, order: StopOrder) -> Ended:
    """Returns how one attempt ended. ServerGoneError: nothing was started, since a process of ours was gone."""
    history = History()
    environ = {**os.environ, **(options.env or {})}
    server = server_for(options, call, environ)
    try:  # not a context manager of contextlib's, which would set attributes of what passes through it
        place = place_of(options)
        with StartingLine(name, place) as line:
            ready = server.ready(number.time_left, line.show)
            lease = leased(options, server, environ, name, line.tell)
            grant = lease.take()
        with lease:  # until the launch's processes have it
            spec = planned(grant.options, ThisMachine(ready, server.count_devices), name, grant.environ, number)
            history.ready = time.monotonic()
            sent, output = sent_as(options, call), output_plan(options, spec, place)
            handle = start(grant, server, spec, sent, output, history)
        try:
            order.attach(handle.ask_to_stop)
            ended = handle.wait()
            if options.start_method == "forkserver":
                hints.tell_imports(name, history.board)
            return ended
        finally:
            handle.close()
    finally:
        if options.start_method != "forkserver":
            server.close()


def start(
    grant: Grant, server: ForkServer, spec: LaunchSpec, sent: Call | None, output: OutputPlan, history: History
) -> LaunchHandle:
    """Starts an attempt. ServerGoneError: nothing was started."""
    takes = not grant.fds or spec.device_type == "cpu"  # one on devices would seldom be on those that are free next
    if grant.options.start_method == "forkserver" and sent is not None and takes:
        return start_or_take(server, spec, sent, output, history, grant)
    return start_launch(server, spec, sent, output, history, grant.fds)


def planned(
    options: Options, machine: ThisMachine, name: str, environ: Mapping[str, str], number: Attempt
) -> LaunchSpec:
    """Plans a launch; its errors are raised as if from the line that called."""
    try:
        spec = plan(options, machine, name, environ, number)
        check_profile_ranks(number.profile, spec.world_size)
        return spec
    except (ValueError, FileNotFoundError) as error:  # what this machine does not have
        raise misuse(error) from None


def sent_as(options: Options, call: Call) -> Call | None:
    """Returns the call as it is sent; None: the ranks have it in memory."""
    if options.start_method == "fork":
        return None
    return Call(calls.portable(call.function), call.args, call.kwargs)


def server_for(options: Options, call: Call, environ: Mapping[str, str]) -> ForkServer:
    """Returns the fork server that the start method asks for; its owner closes one that is not the warm one."""
    if options.start_method == "forkserver":
        return warm_server.get(environ)
    if options.start_method == "spawn":
        return start_server.start_interpreter(environ)
    try:
        return start_server.start_fork(call)
    except RuntimeError as error:  # this process cannot be forked
        raise misuse(error) from None


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, full, closed
            stream.flush()
