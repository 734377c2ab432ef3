"""The course of a submitted call, in steps: a generator that yields what it waits for, so that one thread drives many.

It does what ``caller/launch/call.py`` does in a loop of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import cast

from mlaunch.base.fds import in_forks
from mlaunch.base.log import log
from mlaunch.caller.launch.call import TRIES, flush_streams, planned
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.plan import Attempt, ThisMachine
from mlaunch.caller.launch.restarts import Course, again, may_be_repeated
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.launch.start import start
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, place_of, with_directory
from mlaunch.caller.report.history import History
from mlaunch.caller.server.fork_server import ForkServer, ServerGoneError
from mlaunch.caller.server.warm import warm_server
from mlaunch.core.grants import Grant
from mlaunch.core.load import CallerParts, room
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.sweeps.caller.report_log import in_words
from mlaunch.sweeps.caller.run_future import RunCourse, found_as


@dataclass(frozen=True)
class Need:
    """What a course waits for: one of the descriptors, the seconds, or that somebody wakes it.

    ``later``: after those that end, which may say that it is to be cancelled.
    """

    fds: tuple[int, ...] = ()
    timeout: float | None = None
    later: bool = False


Steps = Generator[Need, None, Ended]
Attempts = Callable[[Options, Call, str, Attempt, RunCourse], Steps]

# Who waits for which devices: the first of each row has a ticket in the queue of all processes. So a sweep has one
# place in it at a time, and lets others in between, and a thousand trials need no thousand tickets.
_rows: dict[tuple[str, ...], deque[RunCourse]] = {}
in_forks(_rows.clear)


def steps_of(options: Options, call: Call, name: str, course: RunCourse, attempt: Attempts) -> Steps:
    """Runs a call to its end, restarts included. CancelledError: it was cancelled before it began."""
    go_on(course)
    if options.log_dir is not None and course.surroundings is not None:
        options = options.replaced({"log_dir": os.path.join(course.surroundings.cwd, options.log_dir)})
    options = with_directory(options, name)
    course.log_dir = None if options.log_dir is None else os.fspath(options.log_dir)
    flush_streams()
    with CallerParts(options) as parts:
        return (yield from _attempts(options, call, name, course, attempt, parts))


def _attempts(
    options: Options, call: Call, name: str, course: RunCourse, attempt: Attempts, parts: CallerParts
) -> Steps:
    begun, left, done = time.monotonic(), options.deadline, Course()
    for restart_count in range(options.max_restarts):
        ended = yield from attempt(options, call, name, Attempt(restart_count, left, parts), course)
        if course.cancelling or course.stop_reason or not may_be_repeated(ended.error):
            return ended
        if not done.goes_on(ended.error, name, log.warning):
            return ended
        log.warning(again(name, restart_count, options.max_restarts, ended.error))
        left = None if options.deadline is None else max(0.0, options.deadline - (time.monotonic() - begun))
    return (yield from attempt(options, call, name, Attempt(options.max_restarts, left, parts), course))


def attempt_here(options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
    """Makes one attempt on this machine."""
    for _ in range(TRIES - 1):
        try:
            return (yield from _try(options, call, name, number, course))
        except ServerGoneError:
            continue
    return (yield from _try(options, call, name, number, course))


def _try(options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
    history = History()
    environ = course.environ(options)
    server = warm_server.get(environ)
    course.starting = True
    while server.waits_for:
        # Not in ready(): the import of torch takes seconds, and this thread drives all other runs.
        yield Need(server.waits_for)
        go_on(course)
    ready = server.ready()
    grant = Grant(options, environ)
    try:
        if number.parts is not None:
            grant = yield from _acquired(number.parts, grant, server, name, course)
        go_on(course)
        course.begins()
        if options.keep is not None:
            from mlaunch.caller.ranks.keep import options_of_ranks  # not needed by most

            own = options_of_ranks(grant).replaced({"deadline": number.time_left})
            return (yield from on_kept(own, call, course))
        machine = ThisMachine(ready, server.count_devices)
        spec = planned(grant, machine, name, number, course.surroundings)
        history.ready = time.monotonic()
        handle = start(grant, server, spec, call, output_of(options, spec, course), history)
    finally:
        # Ours alone: the launch's processes hold copies of the descriptors.
        grant.give_back()
    return (yield from driven(handle, course))


def output_of(options: Options, spec: LaunchSpec, course: RunCourse) -> OutputPlan:
    place = course.place() or place_of(options, blocks=False)
    return output_plan(options if place else options.replaced({"progress": False}), spec, place, course.trial)


def go_on(course: RunCourse) -> None:
    if course.cancelling:
        course.cancelled = True
        raise CancelledError


def _acquired(
    parts: CallerParts, grant: Grant, server: ForkServer, name: str, course: RunCourse
) -> Generator[Need, None, Grant]:
    row = deque[RunCourse]()
    with contextlib.closing(parts.acquire(grant, server, name)) as steps:
        try:
            while True:
                try:
                    wait = next(steps)
                except StopIteration as done:
                    course.starting = True
                    more = len(row) > 1 or course.has_followers()
                    return dataclasses.replace(cast(Grant, done.value), more=more)
                if wait.row:
                    row = _rows.setdefault(wait.row, row)
                    yield from _turn_of(course, row)
                else:
                    yield Need(tuple(wait.fds), wait.timeout, later=True)
                    go_on(course)
        finally:
            if course in row:
                row.remove(course)
            if row:
                row[0].notify()


def _turn_of(course: RunCourse, row: deque[RunCourse]) -> Generator[Need, None, None]:
    """Waits until it is first in the row."""
    row.append(course)
    course.starting = False
    while row[0] is not course:
        yield Need()
        go_on(course)


def on_kept(options: Options, call: Call, course: RunCourse) -> Steps:
    from mlaunch.sweeps.caller.kept_trial import KeptTrial  # not needed by most

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
            yield Need((), course.reports.period(None))
        trial.attach(course.reports)
        course.pass_reports_on()
        course.cancelled = trial.cancelled() or isinstance(trial.exception(), CancelledError)
        return trial.ended()
    finally:
        course.leaves_ranks()


def driven(handle: LaunchHandle, course: RunCourse) -> Steps:
    asked = told = False
    course.runs, course.seen_as = True, lambda: found_as(handle)
    handle.said_last = lambda: in_words(course.reports.latest())
    try:
        while handle.step():
            course.reports.attach(handle.history.board, handle.outcome.spec)
            course.pass_reports_on()
            if course.stop_reason and not told:
                told = True
                room("agreed_stop", "caller", "stop()").ask_to_stop(handle, course.stop_reason)
            if course.cancelling and not asked:
                # Else it ended by itself before: cancel() says False.
                asked = not handle.outcome.failed and not handle.answered
                handle.ask_to_end()
            yield Need((handle.fileno(),), course.reports.period(handle.timeout()))
        course.pass_reports_on()
        course.cancelled = asked and not handle.answered
        return handle.end()
    finally:
        course.leaves_ranks()
        handle.close()
