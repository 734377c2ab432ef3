"""A submitted call: the steps of ``caller/launch/call.py``, in a thread that drives many such calls.

``_followed`` sees what each step waits for: it waits for its turn among calls that want the same devices, passes
reports of ranks on, and ends a call that was cancelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from typing import Any

from mlaunch.base.fds import in_forks
from mlaunch.base.log import log
from mlaunch.caller.launch.call import CallWork, flush_streams, tried
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.plan import Attempt, context_of
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.caller.launch.start import with_restarts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import LivePlace
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, place_of, with_directory
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.warm_server import warm_server
from mlaunch.core.load import CallerParts, room
from mlaunch.core.records import Grant, Need
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context, LaunchSpec
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import Run, RunStatus, found_as, report_in_words

Attempts = Callable[[Options, Call, str, Attempt, RunStatus], Steps]

# The calls that wait for the same devices, by these: only the first of each row is in the queue of all processes. So
# other processes get devices between the trials of a sweep, and a thousand trials do not need a thousand tickets.
_rows: dict[tuple[str, ...], deque[RunStatus]] = {}
in_forks(_rows.clear)


def surroundings_of(options: Options) -> Context:
    """Return what a call takes over from this process: of now, since its ranks start later."""
    return context_of({**os.environ, **(options.env or {})})


def drive(
    run: Run, status: RunStatus, options: Options, call: Call, keep_report: Callable[[Callable[[], LaunchReport]], None]
) -> None:
    """Hand a run to the thread that drives all runs."""

    def tell(how: Ended | BaseException) -> None:
        if isinstance(how, Ended):
            keep_report(how.report)
        try:
            run._end(how)
        finally:
            status.finish()

    engine: Any = options.engine
    attempt = attempt_here if engine is None else engine.attempt  # of machines that are held; see ``check``
    loop.add(steps_of(options, call, run.name, status, attempt), tell)


def steps_of(options: Options, call: Call, name: str, status: RunStatus, attempt: Attempts) -> Steps:
    """Run a call to its end, restarts included. CancelledError: it was cancelled before it began."""
    go_on(status)
    if options.log_dir is not None and status.surroundings is not None:
        options = options.replaced({"log_dir": os.path.join(status.surroundings.cwd, options.log_dir)})
    options = with_directory(options, name)
    status.log_dir = None if options.log_dir is None else os.fspath(options.log_dir)
    flush_streams()
    with CallerParts(options) as parts:
        again = options.deadline, options.max_restarts
        made = with_restarts(
            lambda number: attempt(options, call, name, number, status),
            name, *again, log.warning, parts, lambda: status.cancelling or status.stop_reason,
        )  # fmt: skip
        return (yield from _followed(made, status))


def attempt_here(options: Options, call: Call, name: str, number: Attempt, status: RunStatus) -> Steps:
    """Make one attempt on this machine."""
    status.starting = True
    if options.keep is not None:
        return tried(functools.partial(_on_kept_ranks, options, call, name, number, status))
    work = CallWork(
        options, call, name,
        surroundings=status.surroundings,
        many=True,
        output=functools.partial(_output, status),
        granted=functools.partial(_granted, status),
        around=functools.partial(follows, status),
    )  # fmt: skip
    return work.attempt(number)


def _on_kept_ranks(options: Options, call: Call, name: str, number: Attempt, status: RunStatus) -> Steps:
    from mlaunch.ranks.caller.keep import options_of_ranks  # late: few calls need it

    environ = status.environ(options)
    server, grant = warm_server.get(environ), Grant(options, environ)
    while server.waits_for:
        yield Need(fds=server.waits_for)
    server.ready()
    if number.parts is not None:
        grant = yield from number.parts.acquire(grant, server, name)
    try:
        own = options_of_ranks(_granted(status, grant)).replaced({"deadline": number.time_left})
        return (yield from on_kept(own, call, status))
    finally:
        grant.give_back()


def _granted(status: RunStatus, grant: Grant) -> Grant:
    more = (status.row is not None and len(status.row) > 1) or status.has_followers()
    _leave_row(status)
    status.starting = True
    go_on(status)
    status.begins()
    return dataclasses.replace(grant, more=more)


def output_of(options: Options, spec: LaunchSpec, status: RunStatus) -> OutputPlan:
    """Return where a trial's output goes: among the lines of its sweep, if that has a place."""
    place = status.place() or place_of(options, blocks=False)
    return output_plan(options if place else options.replaced({"progress": False}), spec, place, status.trial)


def _output(status: RunStatus, options: Options, spec: LaunchSpec, _place: LivePlace | None) -> OutputPlan:
    return output_of(options, spec, status)


def go_on(status: RunStatus) -> None:
    """Raise CancelledError if the call is to end before it has ranks."""
    if status.cancelling:
        status.cancelled = True
        raise CancelledError


def _followed(steps: Steps, status: RunStatus) -> Steps:
    """Pass steps on. If the call is cancelled, give up a step that waits; ask ranks that run to end."""
    try:
        while True:
            try:
                need = next(steps)
            except StopIteration as done:
                ended: Ended = done.value
                return ended
            if need.row:
                yield from _turn_of(status, need.row)
                continue
            yield dataclasses.replace(need, timeout=_tend(status, need.timeout))
            if status.handle is None and not need.firm:
                go_on(status)
    finally:
        _leave_row(status)
        steps.close()


def _turn_of(status: RunStatus, wanted: tuple[str, ...]) -> Generator[Need, None, None]:
    """Wait until the call is the first in the row of those that want the same devices."""
    row = status.row = _rows.setdefault(wanted, deque())
    row.append(status)
    status.starting = False
    while row[0] is not status:
        yield Need()
        go_on(status)


def _leave_row(status: RunStatus) -> None:
    row, status.row = status.row, None
    if row is not None:
        row.remove(status)
        if row:
            row[0].notify()


@contextlib.contextmanager
def follows(status: RunStatus, handle: LaunchHandle) -> Iterator[None]:
    """Connect a run and its ranks while this launch is driven: requests to the ranks, reports from them."""
    status.handle, status.asked = handle, set()
    status.runs, status.seen_as = True, lambda: found_as(handle)
    handle.said_last = lambda: report_in_words(status.reports.latest())
    try:
        yield
        status.pass_reports_on()
        status.cancelled = "end" in status.asked and not handle.answered
    finally:
        status.handle = None
        status.leaves_ranks()


def _tend(status: RunStatus, timeout: float | None) -> float | None:
    """Pass requests to the ranks and reports from them on; return the seconds until the next time."""
    handle = status.handle
    if handle is None:
        return timeout
    status.reports.attach(handle.history.board, handle.outcome.spec)
    status.pass_reports_on()
    if status.stop_reason and "stop" not in status.asked:
        status.asked.add("stop")
        room("agreed_stop", "caller", "stop()").ask_to_stop(handle, status.stop_reason)
    if status.cancelling and "end" not in status.asked:
        # Otherwise it had ended by itself: cancel() returns False.
        if not handle.outcome.failed and not handle.answered:
            status.asked.add("end")
        handle.ask_to_end()
    return status.reports.period(timeout)


def on_kept(options: Options, call: Call, status: RunStatus) -> Steps:
    """Run a call on ranks that stay."""
    from mlaunch.sweeps.caller.kept_trial import KeptTrial  # late: few calls need it

    trial = KeptTrial(options, dataclasses.replace(call, seed=options.seed), status.surroundings)
    status.runs, status.seen_as = True, trial.seen_as
    try:
        while not trial.done():
            trial.attach(status.reports)
            status.pass_reports_on()
            if status.stop_reason:
                trial.ask_to_stop(status.stop_reason)
            if status.cancelling:
                trial.end()
            yield Need(timeout=status.reports.period(None), firm=True)
        trial.attach(status.reports)
        status.pass_reports_on()
        status.cancelled = trial.cancelled() or isinstance(trial.exception(), CancelledError)
        return trial.ended()
    finally:
        status.leaves_ranks()
