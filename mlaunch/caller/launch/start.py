"""The start of a launch, the one way from a plan to a handle, for functions and commands; restarts after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, is_misuse, misuse, report_of
from mlaunch.base.frames import innermost_users
from mlaunch.base.text import without_escapes
from mlaunch.caller import interrupts
from mlaunch.caller.fork_server import ForkServer, ServerGoneError, in_memfds
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.launch.settle import Steps
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.launch_report import History
from mlaunch.caller.report.notebook import short_name
from mlaunch.caller.warm_server import preparation
from mlaunch.protocol import calls, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec, details_of

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts
    from mlaunch.core.records import Grant
    from mlaunch.protocol.messages import AgentsEnd, LaunchersEnd

_OF_IMPORTS = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
_MISUSE = 2  # the exit code of argparse for a wrong command line
_MOST_STUCK = 2  # attempts
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def start(
    grant: Grant, server: ForkServer, spec: LaunchSpec, call: Call, output: OutputPlan, history: History
) -> LaunchHandle:
    """Start an attempt at a call, if possible in the launch that the warm server has prepared.

    The server prepares the next launch in any case; after one that holds devices, only if other calls wait for them.

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
    # Before the ranks can begin: an interpreter that ends then, while this thread waits, has to cancel the launch.
    server.adopt(agent)
    try:
        with in_memfds([("call", call)]) as memfds:
            agent.try_send(details_of(spec, len(held)), [*memfds, *held])
    except BaseException as error:
        agent.close()
        name_culprit(error, call, spec.call.name)
        raise


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
        from mlaunch.protocol import explain  # only for this

        raise unpicklable_call(call, name, error) from explain.below_the_pickler(error)


def unpicklable_call(call: Call, name: str, error: Exception) -> Exception:
    """Return the TypeError that says which part of a call cannot be pickled."""
    from mlaunch.protocol import explain  # only for this

    parts: list[tuple[str, object]] = [(f"argument {i} of {name}", arg) for i, arg in enumerate(call.args)]
    parts += [(f"argument {key!r} of {name}", value) for key, value in call.kwargs.items()]
    found, culprit = f"the call of {name}", cast(object, call)
    # Found afterwards, part by part: to look at each argument before would pickle all of them twice.
    for where, value in [*parts, (f"{name}", call.function)]:
        try:
            payload.check(value)
        except Exception:  # whatever a __reduce__ may raise
            part, culprit = explain.culprit(value, where)
            found = f"{part}, which"
            break
    return misuse(TypeError(f"{found} cannot be pickled{explain.reason(error)}{explain.instead_to_pass(culprit)}"))


# Restarts of all ranks after a failure


def with_restarts(
    attempt: Callable[[Attempt], Steps],
    name: str,
    deadline: float | None,
    max_restarts: int,
    tell: Callable[[str], None],
    parts: CallerParts | None = None,
    is_to_stop: Callable[[], object] = bool,
) -> Steps:
    """Make attempts at a call, with at most ``max_restarts`` after the first one; return how the last one ended.

    No attempt follows if somebody ended the call, its time was over, ``is_to_stop`` says so, or a restart does not help
    (see ``FutileAttempts``). ``tell`` gets the reason, before each restart, or instead of one. ``deadline``: of all
    attempts together, in seconds.
    """
    begun, left, seen = time.monotonic(), deadline, FutileAttempts()
    for restart_count in range(max_restarts):
        ended = yield from attempt(Attempt(restart_count, left, parts))
        last = is_to_stop() or (parts is not None and parts.is_last())
        if last or not may_be_repeated(ended.error) or not seen.allow_another(ended.error, name, tell):
            return ended
        tell(again(name, restart_count, max_restarts, ended.error))
        if deadline is not None:
            left = max(0.0, deadline - (time.monotonic() - begun))
    ended = yield from attempt(Attempt(max_restarts, left, parts))
    if ended.error is not None and may_be_repeated(ended.error):
        seen.allow_another(ended.error, name, bool)
    return ended


class FutileAttempts:
    """How the attempts at one call have failed. After two that end alike, there is no third one.

    They end alike by a mistake that a restart meets again: an import that fails at the same line, or exit code 2 (a
    script's wrong command line). Or because they got no further: neither came beyond the step of ``mlaunch.report``
    that was reached before them.
    """

    def __init__(self) -> None:
        self._mistake = ""  # of the last attempt
        self._best: float | None = None  # the furthest step
        self._stuck = 0  # attempts in a row that did not come beyond it

    def allow_another(self, error: BaseException | None, name: str, tell: Callable[[str], object]) -> bool:
        """Note how an attempt failed; return False, and tell why, if another one would fail in the same way."""
        report = report_of(error) if error is not None else None
        if report is None:
            return True
        if why := self._same_mistake(report) or self._no_step(report):
            report.kind = "no_progress"
            tell(f"{name} is not started again: {why}")
        return not why

    def _same_mistake(self, report: LaunchError) -> str:
        cause = report.failures[0]
        of_import = cause.type_name.rpartition(".")[2] in _OF_IMPORTS
        mistake = f"{cause.what}{_line_of(report)}" if of_import or cause.exitcode == _MISUSE else ""
        before, self._mistake = self._mistake, mistake
        return (
            f"two attempts in a row have failed in the same way, and a third would too: {mistake}"
            if mistake and mistake == before
            else ""
        )

    def _no_step(self, report: LaunchError) -> str:
        reached, best = report.reached, self._best
        if reached is not None and (best is None or reached > best):
            self._best, self._stuck = reached, 0
        elif best is not None:
            self._stuck += 1
        if self._stuck < _MOST_STUCK:
            return ""
        return f"two attempts in a row have not got beyond step {self._best:g} of mlaunch.report"


def again(name: str, restart_count: int, max_restarts: int, error: BaseException | None) -> str:
    """Return the sentence that says that the call is started again, and why."""
    report = report_of(error) if error is not None else None
    why = without_escapes(str(report or "").partition("\n")[0]) + _line_of(report)
    return f"{name} is started again (restart {restart_count + 1} of at most {max_restarts}): {why}"


def _line_of(report: LaunchError | None) -> str:
    """Return the line of user code that raised the cause, " (train.py:29)"; "" if it is unknown."""
    frames = _FRAME.findall(report.failures[0].traceback)[::-1] if report is not None and report.failures else []
    place = innermost_users([file for file, _ in frames])
    return "" if place is None else f" ({short_name(frames[place][0])}:{frames[place][1]})"


def may_be_repeated(error: BaseException | None) -> bool:
    """True if the failure may not happen again."""
    report = report_of(error) if isinstance(error, Exception) else None
    if report is None or not report.failures or isinstance(report, LaunchTimeout):
        return False
    # A value that cannot be pickled will not be picklable the next time.
    return not any(failure.final for failure in report.failures) and report.kind != "not_picklable"
