"""``train.submit(...)``: the future of a launch."""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mlaunch.base.log import log
from mlaunch.base.misuse import hides_our_frames
from mlaunch.caller import interrupts
from mlaunch.caller.event_loops import stops_an_event_loop
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.live import LivePlace
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import raises_from_caller, without_ours
from mlaunch.core import load
from mlaunch.protocol import registry
from mlaunch.protocol.spec import Context
from mlaunch.sweeps.caller.report_log import Reported, ReportLog

if TYPE_CHECKING:
    from mlaunch.insight.caller.stacks_of_ranks import StacksOfRanks


class Run(Future[list[Any]]):
    """A launch that was submitted; its result is the list of its ranks' values, in their order.

    A ``concurrent.futures.Future``: ``wait`` and ``as_completed`` of that module, ``asyncio.wrap_future`` and callbacks
    (in the thread that drives the launches) take it. It goes on if nobody keeps it, and ends with this process.

    Attributes:
        name: The function's, "train()".
        arguments: What the function was given, by name.
        report: The LaunchReport; None before it is over.
        log_dir: Its directory in ``log_dir=``; None before it has begun.
        state: "waiting" (for devices, for those before it), "starting", "running", "returned", "failed" or "cancelled".
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], course: RunCourse) -> None:
        super().__init__()
        # With the usual one, Ctrl-C in result() may leave it locked, and the thread that tells the values hangs.
        self._condition = interrupts.Condition()  # type: ignore[assignment]
        self._waiters = _Waiters(course)  # type: ignore[assignment]  # which nobody may see
        self.name, self.arguments = name, dict(arguments)
        self._course = course

    @property
    def report(self) -> LaunchReport | None:
        make = self._course.make_report
        return None if make is None else make()

    @property
    def log_dir(self) -> str | None:
        return self._course.log_dir

    @property
    def state(self) -> str:
        """Says where it is: "waiting", "starting", "running", "returned", "failed" or "cancelled"."""
        if not self.done():
            return "running" if self.running() else "starting" if self._course.starting else "waiting"
        return "cancelled" if self.cancelled() else "returned" if self.exception() is None else "failed"

    @property
    def reports(self) -> list[Reported]:
        """What the ranks have reported until now (``mlaunch.report``).

        10,000 at most. Of what a rank has reported since the last look at it, the latest 256.
        """
        return self._course.reports.read()

    @property
    def latest(self) -> Reported | None:
        """What was reported last, by whichever rank."""
        return self._course.reports.latest()

    def on_report(self, callback: Callable[[Reported], object]) -> None:
        """Calls back for each report to come, within a tenth of a second, in the thread that drives launches.

        To prune: ``run.on_report(lambda report: report["loss"] > 10 and run.stop())``.
        """
        self._course.reports.tell(callback)
        self._course.notify()

    def __reduce__(self) -> NoReturn:
        raise TypeError("only the process that made this future can wait for it: pass its result()")

    @raises_from_caller
    def result(self, timeout: float | None = None) -> list[Any]:
        if not self.done():
            self._course.before_wait()
        return super().result(timeout)

    @raises_from_caller
    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._course.before_wait()
        return super().exception(timeout)

    def running(self) -> bool:
        """Tells whether ranks were started for it and it is not over."""
        return self._course.runs and not self.done()

    @raises_from_caller
    def cancel(self) -> bool:
        """Ends the run, and returns when its processes are gone; a run that waits starts none. Can be interrupted.

        In a callback, and in a thread that runs an event loop of asyncio (not a notebook's cell), it does not wait.

        Returns:
            Whether it ended by that: not if it was over, or all ranks had returned, or one had failed. Where it does
            not wait, whether it is asked to.
        """
        if not self.done():
            self._course.check_process()
        self._course.ask_to_cancel()
        if self._course.in_callback() or (not self.done() and stops_an_event_loop()):
            return self.cancelled() or not self.done()
        return self._wait_for_end()

    def _wait_for_end(self) -> bool:
        """Wait until its processes are gone; True if it was cancelled."""
        with interrupts.allowed():
            self._course.over.wait()
        return self.cancelled()

    def stacks(self) -> StacksOfRanks:
        """Returns the Python stacks of its ranks as they are now, by rank; none of one that has not begun or is over.

        The ranks continue meanwhile. Printed, they are as ``mlaunch stacks`` shows them.
        """
        room, found = load.room("insight", "caller", "run.stacks()"), self._course.seen_as()
        name = None if found is None or self.done() else registry.name_of(*found)
        stacks: StacksOfRanks = room.stacks_of(name)
        return stacks

    def why(self) -> str:
        """Says which rank the others wait for, and what it does instead; "" if no ranks run."""
        room, found = load.room("insight", "caller", "run.why()"), self._course.seen_as()
        said: str = "" if found is None or self.done() else room.why_launch(found[0])
        return said

    def stop(self, reason: str = "asked") -> bool:
        """Asks the ranks to stop at a step that they agree on, where ``mlaunch.stopping`` returns the reason.

        Does not wait. The values become the result, as ever; ranks that do not look are ended after ``stop_grace``. A
        run that has not begun hears of it at its first look, and is not started again.

        Returns:
            Whether it is not over.
        """
        if not self.done():
            self._course.check_process()
        self._course.stop_reason = self._course.stop_reason or reason
        self._course.notify()
        return not self.done()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        state = "done" if self.state in {"returned", "failed"} else self.state
        return f"<Run of {self.name.removesuffix('()')}({given}): {state}>"

    def _end(self, how: Ended | BaseException) -> None:
        """Tells how it ended, or why it did not begin. It was pending before: ``Future`` cancels nothing that runs."""
        error = how.error if isinstance(how, Ended) else how
        if isinstance(how, Ended):
            self._course.make_report = how.report
        if self._course.cancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None or not isinstance(how, Ended):
            self.set_exception(None if error is None else _without_locals(error))
        else:
            self.set_result(how.values)
        with self._condition:
            self._done_callbacks: list[Callable[[Future[list[Any]]], object]] = []  # which Future would keep

    def _invoke_callbacks(self) -> None:
        """Call what waits for the end. A ``sys.exit`` in one keeps the others, asyncio's among them, from nothing."""
        for callback in self._done_callbacks:
            try:
                callback(self)
            except BaseException:
                log.exception("a callback of a submitted launch raised")


class _Waiters(list[object]):
    """Who waits for a run by ``concurrent.futures.wait`` or ``as_completed``, which put themselves in first."""

    def __init__(self, course: RunCourse) -> None:
        super().__init__()
        self._course = course

    def append(self, waiter: object) -> None:
        self._course.before_wait()
        super().append(waiter)


def _nowhere() -> None: ...


def found_as(handle: LaunchHandle) -> tuple[str, int]:
    """Returns by which ID, and first rank, a launch is found by those who look at it."""
    spec = handle.outcome.spec
    return handle.seen_as or spec.launch_id, spec.rank_start


class Drives(Protocol):
    """What drives runs; see ``sweeps/caller/launch_loop.py``."""

    def notify(self) -> None: ...
    def is_here(self) -> bool: ...
    def hand_over(self) -> None: ...


@dataclass(eq=False)
class RunCourse:
    """What is known of a run while it is driven."""

    loop: Drives
    surroundings: Context | None = None  # of the call; None: those of the moment at which it begins
    cancelling: bool = False  # somebody wants it to end
    cancelled: bool = False  # it ended by that
    stop_reason: str = ""  # why its ranks are to stop; "": they are not
    starting: bool = False  # it has what it waits for: the fork server imports torch, or forks the agent
    runs: bool = False  # on ranks of its own, or that stay
    seen_as: Callable[[], tuple[str, int] | None] = _nowhere  # by which ID, and first rank, those find it who look
    log_dir: str | None = None
    make_report: Callable[[], LaunchReport] | None = None
    reports: ReportLog = field(default_factory=ReportLog)
    over: threading.Event = field(default_factory=threading.Event)
    has_followers: Callable[[], bool] = lambda: False  # tells whether others will wait for what it has
    begins: Callable[[], None] = lambda: None  # called when it has what it waits for, before its ranks are started
    place: Callable[[], LivePlace | None] = lambda: None  # for lines that change; None: of its own
    trial: str = ""  # what tells its output from that of the other trials of its sweep; "": it is none
    pid: int = field(default_factory=os.getpid)  # of the process that has submitted it
    row: deque[RunCourse] | None = None  # of those who want the same devices, of which it is one
    handle: LaunchHandle | None = None  # of its ranks, while they are driven
    asked: set[str] = field(default_factory=set)  # of these ranks: to "stop", to "end"
    _telling: int | None = None  # the thread that calls back for its reports

    def notify(self) -> None:
        self.loop.notify()

    def check_process(self) -> None:
        """Raise RuntimeError in a fork of the process that has submitted it, which hears no more of it."""
        if self.pid != os.getpid():
            raise RuntimeError(f"this run was submitted by process {self.pid}, of which this one is a fork: ask there")

    def in_callback(self) -> bool:
        """True in a callback, for the end of which the thread that drives waits."""
        return self.loop.is_here()

    def before_wait(self) -> None:
        """Let another thread drive if it is a callback that is about to wait, in the thread that drives.

        RuntimeError: it waits for the run that calls it back, which goes on only after that.
        """
        self.check_process()
        if self._telling == threading.get_ident():
            raise RuntimeError("a callback waits for the run that has called it, which goes on only after that")
        self.loop.hand_over()

    def pass_reports_on(self) -> None:
        """Call back for what ranks have reported."""
        self._telling = threading.get_ident()
        try:
            self.reports.pass_on()
        finally:
            self._telling = None

    def environ(self, options: Options) -> dict[str, str]:
        """Return the environment that it was asked for in."""
        around = os.environ if self.surroundings is None else self.surroundings.environ
        return {**around, **(options.env or {})}

    def leaves_ranks(self) -> None:
        """Lets go of what its ranks were known by, which may be another run's next."""
        self.runs, self.seen_as = False, _nowhere
        self.reports.detach()

    def ask_to_cancel(self) -> None:
        """Begins what ``Run.cancel`` does, without waiting for it."""
        self.cancelling = True
        self.notify()

    def finish(self) -> None:
        """Wakes who waits for its end, and drops what only a run needs that goes on: a run may be kept."""
        self.begins = self.place = _nothing
        self.surroundings = None
        self.reports.finish()
        self.over.set()


def _nothing() -> None: ...


def _without_locals(error: BaseException) -> BaseException:
    """Returns the error without what the frames of its traceback hold: with it a run would keep its launch's handle."""
    found = [error]
    for link in found:  # which may be each other's cause, and have a user's __eq__
        traceback.clear_frames(link.__traceback__)
        for other in (link.__cause__, link.__context__):
            if other is not None and all(other is not known for known in found):
                found.append(other)
    return without_ours(error) if hides_our_frames(error) else error
