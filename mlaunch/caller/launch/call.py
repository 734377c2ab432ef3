"""One call of a decorated function, in the caller's process: plan it, start it, and start it again if it fails and may.

call_on_ranks
  +-> CallWork.steps: server ready -> all granted -> planned -> started -> LaunchHandle.drive -> Ended
         ^         |                                            |
         +---------+  the server was gone before anything ran   |  (TRIES times)
         +------------------------------------------------------+  a rank failed (max_restarts times)

Each of these is a generator of what it waits for, which ``interrupts.carry_out`` drives here, and ``submit`` in a
thread of many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlaunch.base import own_process
from mlaunch.base.exceptions import LaunchError, misuse
from mlaunch.caller import fork_server, interrupts
from mlaunch.caller.fork_server import ForkServer, ServerGoneError
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.caller.launch.start import start, with_restarts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import Console, StartingLine
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, place_of, with_directory
from mlaunch.caller.report.launch_report import History
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.caller.warm_server import warm_server
from mlaunch.core.records import Grant, Need
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context, LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.launch.handle import LaunchHandle
    from mlaunch.caller.output.console import LivePlace
    from mlaunch.core.load import CallerParts
    from mlaunch.protocol.board import Board

# A warm server that is killed just before the call still looks alive, and so does a prepared launch.
TRIES = 3
_TOLD_AT = 2  # imports of a package, after which the user gets a hint
_imports: dict[str, int] = {}  # by package: how many calls have had to import it


def call_on_ranks(
    options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Ended:
    """Run the function once per device; return how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    if options.features:
        from mlaunch.core.load import adapted  # most calls do not need it

        options = adapted(options)
    if options.log_dir is not None:
        options = with_directory(options, name)
    flush_streams()  # what was printed before the call comes before what the ranks print
    work = CallWork(options, Call(function, args, kwargs), name)
    try:
        if options.features:
            return with_parts(options, lambda parts: dataclasses.replace(work, parts=parts).steps())
        # Python runs signal handlers between any two steps, also between receiving a descriptor and keeping it: of 400
        # interrupts within the first 12 ms of a call some leaked descriptors, and one lost the fork server's first
        # word.
        with interrupts.deferred():
            return interrupts.carry_out(work.steps())
    except OSError as error:
        own_process.name_limit(error)
        raise


def with_parts(options: Options, make: Callable[[CallerParts], Steps]) -> Ended:
    """Make the parts of features that the options ask for, carry out what ``make`` makes with them; return its end."""
    from mlaunch.core.load import CallerParts  # most calls do not need it

    parts: CallerParts | None = None
    try:
        with interrupts.deferred():
            parts = CallerParts(options)
        # Parts that take signals over do so before the deferral, which passes signals on if nothing is in flight.
        with parts.around(), interrupts.deferred():
            ended = interrupts.carry_out(make(parts))
            parts.settled(ended, warn_caller)
            return ended
    finally:
        if parts is not None:
            parts.close()


@dataclass(frozen=True)
class CallWork:
    """The state that all attempts at a call on ranks of its own share.

    ``many``: its thread drives other calls, too, which must not wait for it. ``surroundings``: those of the moment at
    which the call was asked for; None: those of each attempt. ``granted`` takes what an attempt may use, once it need
    not wait any more, and reports that; ``around`` is held while its ranks run.
    """

    options: Options
    call: Call
    name: str
    parts: CallerParts | None = None
    surroundings: Context | None = None
    many: bool = False
    output: Callable[[Options, LaunchSpec, LivePlace | None], OutputPlan] = output_plan
    granted: Callable[[Grant], Grant] | None = None
    around: Callable[[LaunchHandle], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def steps(self) -> Steps:
        """Make all attempts; return how the last one ended."""
        again = self.options.deadline, self.options.max_restarts
        return with_restarts(self.attempt, self.name, *again, warn_caller, self.parts)

    def attempt(self, number: Attempt) -> Steps:
        """Make one attempt, and others in its place if agent or fork server were gone before anything ran."""
        if self.options.start_method != "forkserver":  # then the server belongs to this call only
            return self._try(number)
        return tried(functools.partial(self._try, number))

    def _try(self, number: Attempt) -> Steps:
        """Return how one attempt ended. ServerGoneError if agent or fork server were gone, so that nothing has run."""
        options, name, around, history = self.options, self.name, self.surroundings, History()
        environ = {**(os.environ if around is None else around.environ), **(options.env or {})}
        server = server_for(options, self.call, environ)
        try:  # not a context manager of contextlib's, which would set attributes of exceptions that pass through it
            place = None if self.many else place_of(options)
            with StartingLine(name, place) as line:
                while self.many and server.waits_for:  # the import of torch takes seconds
                    yield Need(fds=server.waits_for)
                machine = ThisMachine(server.ready(number.time_left, line.show), server.count_devices)
                grant = Grant(options, environ)
                if number.parts is not None:
                    steps = number.parts.acquire(grant, server, name)
                    grant = yield from steps if self.many else with_words(steps, line.tell_wait, line.silence)
            try:  # until the launch's processes hold what it was granted
                if self.granted is not None:
                    grant = self.granted(grant)
                spec = planned(grant, machine, name, number, around)
                history.ready = time.monotonic()
                handle = start(grant, server, spec, self.call, self.output(options, spec, place), history)
            finally:
                grant.give_back()
            return (yield from self._drive(handle, number))
        finally:
            if options.start_method != "forkserver":
                server.close()

    def _drive(self, handle: LaunchHandle, number: Attempt) -> Steps:
        try:
            if number.parts is not None:
                handle.attach(number.parts)
            with self.around(handle):
                ended = yield from handle.drive()
            if self.options.start_method == "forkserver" and not self.many:
                tell_imports(self.name, handle.history.board)
            return ended
        finally:
            handle.close()


def tried(attempt: Callable[[], Steps]) -> Steps:
    """Make an attempt, and repeat it at a ServerGoneError. LaunchError if one server after the other is gone."""
    left = TRIES
    while True:
        left -= 1
        try:
            return (yield from attempt())
        except ServerGoneError as error:
            if not left:
                raise LaunchError(
                    f"{error}; {TRIES - 1} others before it ended in the same way. Look for what kills them: the "
                    f"kernel, if memory was short (dmesg), or a limit of this machine"
                ) from error


def acquired(
    parts: CallerParts, grant: Grant, server: ForkServer, name: str, tell: Callable[[str], None],
    silence: float = 0.0,
) -> Grant:  # fmt: skip
    """Wait in this thread for what an attempt may use; give it back once the attempt is started. Can be interrupted.

    ``tell`` gets the reasons for the wait, after ``silence`` seconds.
    """
    return interrupts.carry_out(with_words(parts.acquire(grant, server, name), tell, silence))


def with_words(
    steps: Generator[Need, None, Grant], tell: Callable[[str], None], silence: float
) -> Generator[Need, None, Grant]:
    """Pass on the steps, and tell the user what each of them waits for, after ``silence`` seconds."""
    with contextlib.closing(steps):
        told, tell_at = "", time.monotonic() + silence
        while True:
            try:
                need = next(steps)
            except StopIteration as done:
                granted: Grant = done.value
                return granted
            left = tell_at - time.monotonic()
            if need.text != told and left <= 0:
                tell(need.text)
                told = need.text
            elif need.text != told:
                timeout = left if need.timeout is None else min(left, need.timeout)
                need = dataclasses.replace(need, timeout=timeout)
            yield need


def planned(
    grant: Grant, machine: ThisMachine, name: str, number: Attempt, surroundings: Context | None = None
) -> LaunchSpec:
    """Plan a launch; its errors are raised as if from the line that called.

    ``surroundings``: those of the moment at which it was asked for; None: those of now.
    """
    if number.parts is None and grant.options.features:  # nobody holds parts of this call around it
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
    """Return the fork server that the start method asks for. Its owner must close it, unless it is the warm one."""
    if options.start_method == "forkserver":
        return warm_server.get(environ)
    if options.start_method == "spawn":
        return fork_server.start_interpreter(environ)
    try:
        return fork_server.start_fork(call)
    except RuntimeError as error:  # this process cannot be forked
        raise misuse(error) from None


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # None, full, closed
            continue


def tell_imports(name: str, board: Board | None) -> None:
    """Tell the user which package each call imports again: after the second slow import, once per package."""
    package, seconds = board.imported(0) if board is not None else ("", "")
    if not package:
        return
    _imports[package] = _imports.get(package, 0) + 1
    if _imports[package] == _TOLD_AT:
        console = Console()
        console.say(
            f"{name} imports {package} again in the ranks of each call, {seconds} s in this one; to import it once: "
            f"mlaunch.warm_up(preload=[{package!r}]) before the first call, provided that it starts no thread and uses "
            f"no device"
        )
        console.close()
