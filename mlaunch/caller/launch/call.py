"""One call of a decorated function, in the caller's process: plan it, start it, and again if it fails and may.

call_on_ranks
  +-> _Attempts: server ready -> all granted -> planned -> started -> LaunchHandle.wait -> Ended
         ^         |                                            |
         +---------+  the server was gone before anything ran   |  (TRIES times)
         +------------------------------------------------------+  a rank failed (max_restarts times)
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlaunch.base import rlimits
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.misuse import misuse
from mlaunch.caller import interrupts
from mlaunch.caller.launch import hints
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.launch.restarts import with_restarts
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.launch.start import start
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.live import StartingLine
from mlaunch.caller.output.output_plan import output_plan, place_of, with_directory
from mlaunch.caller.report.history import History
from mlaunch.caller.server import start_server
from mlaunch.caller.server.fork_server import ForkServer, ServerGoneError
from mlaunch.caller.server.warm import warm_server
from mlaunch.caller.warn import warn_caller
from mlaunch.core.grants import Grant
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context, LaunchSpec

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts

# A warm server that is killed just before the call still looks alive, and so does a prepared launch.
TRIES = 3


def call_on_ranks(
    options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Ended:
    """Runs the function once per device; returns how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    if options.debug:
        options = _debugged(options, name)
    options = with_directory(options, name)
    flush_streams()  # what was printed before the call stands before what the ranks print
    attempts = _Attempts(options, Call(function, args, kwargs), name)
    try:
        if options.features:
            return with_parts(options, lambda parts: dataclasses.replace(attempts, parts=parts).all())
        # Python runs signal handlers between any two steps, also between receiving a descriptor and keeping it: of
        # 400 interrupts within the first 12 ms of a call some leaked descriptors, and one lost the fork server's
        # first word.
        with interrupts.deferred():
            return attempts.all()
    except OSError as error:
        rlimits.name_limit(error)
        raise


def with_parts(options: Options, make: Callable[[CallerParts], Ended]) -> Ended:
    """Return how the attempts ended that ``make`` makes with the parts of what the options ask for."""
    from mlaunch.core.load import CallerParts  # which most calls do not need

    parts: CallerParts | None = None
    try:
        with interrupts.deferred():
            parts = CallerParts(options)
        # Those that take signals over do so before the deferral, which passes them on where nothing is in flight.
        with parts.around(), interrupts.deferred():
            ended = make(parts)
            parts.settled(ended, warn_caller)
            return ended
    finally:
        if parts is not None:
            parts.close()


def _debugged(options: Options, name: str) -> Options:
    """Returns the options without clocks, which would count while somebody reads. ValueError: there is nobody."""
    if options.debug is True:
        from mlaunch.caller.debugging import asking  # for this alone

        asking.check_place(name)
    elif importlib.util.find_spec("debugpy") is None:
        raise misuse(ModuleNotFoundError(f"debug={options.debug!r} for {name} needs debugpy (extra: debug)"))
    deadline = options.deadline if options.debug is True else None  # it is held while there is a prompt
    return options.replaced({"timeout": None, "deadline": deadline, "stall": None})


@dataclass(frozen=True)
class _Attempts:
    """What all attempts of a call have in common."""

    options: Options
    call: Call
    name: str
    parts: CallerParts | None = None

    def all(self) -> Ended:
        """Returns how the last one ended."""
        again = self.options.deadline, self.options.max_restarts
        return with_restarts(
            self._make, self.name, *again, warn_caller, lambda: self.parts is not None and self.parts.is_last
        )

    def _make(self, time_left: float | None, restart_count: int) -> Ended:
        left = TRIES
        while True:
            left -= 1
            try:
                return self._try(Attempt(restart_count, time_left, self.parts))
            except ServerGoneError as error:
                if self.options.start_method != "forkserver":  # then the server was this call's own
                    raise
                if not left:
                    raise LaunchError(
                        f"{error}; {TRIES - 1} others before it met the same end. Look for what kills them: the "
                        f"kernel, for want of memory (dmesg), or a limit of this machine"
                    ) from error

    def _try(self, number: Attempt) -> Ended:
        """Returns how one attempt ended. ServerGoneError: nothing was started, since a process of ours was gone."""
        options, name, history = self.options, self.name, History()
        environ = {**os.environ, **(options.env or {})}
        server = server_for(options, self.call, environ)
        try:  # not a context manager of contextlib's, which would set attributes of what passes through it
            place = place_of(options)
            with StartingLine(name, place) as line:
                ready = server.ready(number.time_left, line.show)
                grant = acquired(self.parts, Grant(options, environ), server, name, line.tell_wait, line.silence)
            try:  # until the launch's processes hold what it was granted
                spec = planned(grant, ThisMachine(ready, server.count_devices), name, number)
                history.ready = time.monotonic()
                handle = start(grant, server, spec, self.call, output_plan(options, spec, place), history)
            finally:
                grant.give_back()
            try:
                if self.parts is not None:
                    handle.attach(self.parts)
                ended = handle.wait()
                if options.start_method == "forkserver":
                    hints.tell_imports(name, history.board)
                return ended
            finally:
                handle.close()
        finally:
            if options.start_method != "forkserver":
                server.close()


def acquired(
    parts: CallerParts | None, grant: Grant, server: ForkServer, name: str, tell: Callable[[str], None],
    silence: float = 0.0,
) -> Grant:  # fmt: skip
    """Returns what an attempt may use: at once, or after a wait, of which ``tell`` gets the reasons.

    ``silence``: seconds for which it gets none. Can be interrupted. To be given back once the attempt is started.
    """
    if parts is None:
        return grant
    with contextlib.closing(parts.acquire(grant, server, name)) as steps:
        told, tell_at = "", time.monotonic() + silence
        while True:
            try:
                wait = next(steps)
            except StopIteration as done:
                granted: Grant = done.value
                return granted
            if wait.row:  # which only a process with many calls has
                continue
            left, timeout = tell_at - time.monotonic(), wait.timeout
            if wait.text != told and left <= 0:
                tell(wait.text)
                told = wait.text
            elif wait.text != told:
                timeout = left if timeout is None else min(left, timeout)
            interrupts.wait_readable(wait.fds, timeout)


def planned(
    grant: Grant, machine: ThisMachine, name: str, number: Attempt, surroundings: Context | None = None
) -> LaunchSpec:
    """Plan a launch; its errors are raised as if from the line that called.

    ``surroundings``: of the moment at which it was asked for; None: that is now.
    """
    if number.parts is None and grant.options.features:  # nobody holds parts of a call's own around it
        from mlaunch.core.load import CallerParts

        with CallerParts(grant.options) as parts:
            number = dataclasses.replace(number, parts=parts)
            return planned(grant, machine, name, number, surroundings)
    try:
        spec = plan(grant.options, machine, name, grant.environ, number)
        if number.parts is not None:
            number.parts.planned(spec)
        around = spec.context
        if surroundings is not None:
            around = dataclasses.replace(surroundings, environ=dict(grant.environ))
        if grant.of_call:
            around = dataclasses.replace(around, of_call=grant.of_call)
        return spec if around is spec.context else dataclasses.replace(spec, context=around)
    except (ValueError, FileNotFoundError) as error:  # what this machine does not have
        raise misuse(error) from None


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
