"""The course of a submitted call on machines that an engine holds: on those that no other one has, as soon as they are.

What may take seconds there is done in a thread of the call's own: the one that drives all launches waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, cast

from mlaunch.base.exceptions import LaunchError
from mlaunch.caller.launch.call import TRIES
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.many.course import Need, Steps, driven, go_on, on_kept, output_of
from mlaunch.caller.many.run_future import RunCourse
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol.calls import Call

if TYPE_CHECKING:
    from mlaunch.caller.many.held_machines import ClaimsMachines, HoldsMachines

T = TypeVar("T")


def attempt_on_machines(options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
    """Makes one attempt. If machines turn out to be lost before anything has run there, others are taken."""
    engine = cast("HoldsMachines", options.engine)
    left = TRIES
    while True:
        left -= 1
        claim = engine.claim(options.machines, course.notify, course.ask_to_cancel)
        try:
            course.starting = False
            while not claim.take():
                yield Need(later=True)
                go_on(course)
            course.starting = True
            course.begins()
            return (yield from _on_claimed(claim, options, call, name, number, course))
        except LaunchError:
            if not claim.lost or not left:
                raise
        finally:
            claim.close()


def _on_claimed(
    claim: ClaimsMachines, options: Options, call: Call, name: str, number: Attempt, course: RunCourse
) -> Steps:
    part = yield from _elsewhere(claim.part, course)
    if options.keep is not None:
        own = {"engine": part, "machines": None, "deadline": number.time_left}
        return (yield from on_kept(options.replaced(own), call, course))
    launch = yield from _elsewhere(
        lambda: part.start(options, call, name, number, lambda spec: output_of(options, spec, course)), course
    )
    try:
        ended = yield from driven(launch.handle, course)
    except BaseException:
        launch.close()
        raise
    yield from _elsewhere(launch.close, course)
    return ended


def _elsewhere(work: Callable[[], T], course: RunCourse) -> Generator[Need, None, T]:
    """Waits for what another thread does."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        course.notify()

    # A thread for each, and no pool: in a pool, work that hangs on one machine would hold up that of all others.
    threading.Thread(target=run, daemon=True).start()
    while not future.done():
        yield Need()
    return future.result()
