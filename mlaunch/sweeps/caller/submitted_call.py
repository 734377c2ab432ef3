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
from mlaunch.caller.server.warm_server import warm_server
from mlaunch.core.load import CallerParts, room
from mlaunch.core.records import Grant, Need
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context, LaunchSpec
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.report_log import in_words
from mlaunch.sweeps.caller.run_future import Run, RunCourse, found_as

Attempts = Callable[[Options, Call, str, Attempt, RunCourse], Steps]

# The calls that wait for the same devices, by these: only the first of each row is in the queue of all processes. So
# other processes get devices between the trials of a sweep, and a thousand trials do not need a thousand tickets.
_rows: dict[tuple[str, ...], deque[RunCourse]] = {}
in_forks(_rows.clear)


def surroundings_of(options: Options) -> Context:
    """Return what a call takes over from this process now: ranks start later, when it may have changed."""
    return context_of({**os.environ, **(options.env or {})})


def drive(
    run: Run, course: RunCourse, options: Options, call: Call, keep_report: Callable[[LaunchReport], None]
) -> None:
    """Hand a run to the thread that drives all runs."""

    def tell(how: Ended | BaseException) -> None:
        if isinstance(how, Ended):
            keep_report(how.report())
        try:
            run._end(how)
        finally:
            course.finish()

    engine: Any = options.engine
    attempt = attempt_here if engine is None else engine.attempt  # of machines that are held; see ``check``
    loop.add(steps_of(options, call, run.name, course, attempt), tell)


def steps_of(options: Options, call: Call, name: str, course: RunCourse, attempt: Attempts) -> Steps:
    """Run a call to its end, restarts included. CancelledError: it was cancelled before it began."""
    go_on(course)
    if options.log_dir is not None and course.surroundings is not None:
        options = options.replaced({"log_dir": os.path.join(course.surroundings.cwd, options.log_dir)})
    options = with_directory(options, name)
    course.log_dir = None if options.log_dir is None else os.fspath(options.log_dir)
    flush_streams()
    with CallerParts(options) as parts:
        again = options.deadline, options.max_restarts
        made = with_restarts(
            lambda number: attempt(options, call, name, number, course),
            name, *again, log.warning, parts, lambda: course.cancelling or course.stop_reason,
        )  # fmt: skip
        return (yield from _followed(made, course))


def attempt_here(options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
    """Make one attempt on this machine."""
    course.starting = True
    if options.keep is not None:
        return tried(functools.partial(_on_kept_ranks, options, call, name, number, course))
    work = CallWork(
        options, call, name,
        surroundings=course.surroundings,
        many=True,
        output=functools.partial(_output, course),
        granted=functools.partial(_granted, course),
        around=functools.partial(follows, course),
    )  # fmt: skip
    return work.attempt(number)


def _on_kept_ranks(options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
    from mlaunch.ranks.caller.keep import options_of_ranks  # late: few calls need it

    environ = course.environ(options)
    server, grant = warm_server.get(environ), Grant(options, environ)
    while server.waits_for:
        yield Need(fds=server.waits_for)
    server.ready()
    if number.parts is not None:
        grant = yield from number.parts.acquire(grant, server, name)
    try:
        own = options_of_ranks(_granted(course, grant)).replaced({"deadline": number.time_left})
        return (yield from on_kept(own, call, course))
    finally:
        grant.give_back()


def _granted(course: RunCourse, grant: Grant) -> Grant:
    more = (course.row is not None and len(course.row) > 1) or course.has_followers()
    _leave_row(course)
    course.starting = True
    go_on(course)
    course.begins()
    return dataclasses.replace(grant, more=more)


def output_of(options: Options, spec: LaunchSpec, course: RunCourse) -> OutputPlan:
    """Return where a trial's output goes: among the lines of its sweep, if that has a place."""
    place = course.place() or place_of(options, blocks=False)
    return output_plan(options if place else options.replaced({"progress": False}), spec, place, course.trial)


def _output(course: RunCourse, options: Options, spec: LaunchSpec, _place: LivePlace | None) -> OutputPlan:
    return output_of(options, spec, course)


def go_on(course: RunCourse) -> None:
    """Raise CancelledError if the call is to end before it has ranks."""
    if course.cancelling:
        course.cancelled = True
        raise CancelledError


def _followed(steps: Steps, course: RunCourse) -> Steps:
    """Pass steps on. If the call is cancelled, give up a step that waits; ask ranks that run to end."""
    try:
        while True:
            try:
                need = next(steps)
            except StopIteration as done:
                ended: Ended = done.value
                return ended
            if need.row:
                yield from _turn_of(course, need.row)
                continue
            yield dataclasses.replace(need, timeout=_tend(course, need.timeout))
            if course.handle is None and not need.firm:
                go_on(course)
    finally:
        _leave_row(course)
        steps.close()


def _turn_of(course: RunCourse, wanted: tuple[str, ...]) -> Generator[Need, None, None]:
    """Wait until the call is the first in the row of those that want the same devices."""
    row = course.row = _rows.setdefault(wanted, deque())
    row.append(course)
    course.starting = False
    while row[0] is not course:
        yield Need()
        go_on(course)


def _leave_row(course: RunCourse) -> None:
    row, course.row = course.row, None
    if row is not None:
        row.remove(course)
        if row:
            row[0].notify()


@contextlib.contextmanager
def follows(course: RunCourse, handle: LaunchHandle) -> Iterator[None]:
    """Connect a run and its ranks while this launch is driven: requests to the ranks, reports from them."""
    course.handle, course.asked = handle, set()
    course.runs, course.seen_as = True, lambda: found_as(handle)
    handle.said_last = lambda: in_words(course.reports.latest())
    try:
        yield
        course.pass_reports_on()
        course.cancelled = "end" in course.asked and not handle.answered
    finally:
        course.handle = None
        course.leaves_ranks()


def _tend(course: RunCourse, timeout: float | None) -> float | None:
    """Pass requests to the ranks and reports from them on; return the seconds until the next time."""
    handle = course.handle
    if handle is None:
        return timeout
    course.reports.attach(handle.history.board, handle.outcome.spec)
    course.pass_reports_on()
    if course.stop_reason and "stop" not in course.asked:
        course.asked.add("stop")
        room("agreed_stop", "caller", "stop()").ask_to_stop(handle, course.stop_reason)
    if course.cancelling and "end" not in course.asked:
        # Otherwise it had ended by itself: cancel() returns False.
        if not handle.outcome.failed and not handle.answered:
            course.asked.add("end")
        handle.ask_to_end()
    return course.reports.period(timeout)


def on_kept(options: Options, call: Call, course: RunCourse) -> Steps:
    """Run a call on ranks that stay."""
    from mlaunch.sweeps.caller.kept_trial import KeptTrial  # late: few calls need it

    trial = KeptTrial(options, dataclasses.replace(call, seed=options.seed), course.surroundings, course.notify)
    course.runs, course.seen_as = True, trial.seen_as
    try:
        while not trial.done():
            trial.attach(course.reports)
            course.pass_reports_on()
            if course.stop_reason:
                trial.ask_to_stop(course.stop_reason)
            if course.cancelling:
                trial.end()
            yield Need(timeout=course.reports.period(None), firm=True)
        trial.attach(course.reports)
        course.pass_reports_on()
        course.cancelled = trial.cancelled() or isinstance(trial.exception(), CancelledError)
        return trial.ended()
    finally:
        course.leaves_ranks()
