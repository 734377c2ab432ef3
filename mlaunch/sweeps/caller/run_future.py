"""The future that ``train.submit(...)`` returns, with the reports of its ranks and its state."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from mlaunch.base.exceptions import hides_our_frames
from mlaunch.base.fds import renewed
from mlaunch.base.log import log
from mlaunch.caller import interrupts
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import LivePlace
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import raises_from_caller, without_ours
from mlaunch.core import load
from mlaunch.protocol import registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.spec import Context, LaunchSpec
from mlaunch.sweeps.caller.launch_loop import loop

if TYPE_CHECKING:
    from mlaunch.insight.caller import StacksOfRanks


class Run(Future[list[Any]]):
    """A launch that was submitted; its result is the list of its ranks' values, in the order of ranks.

    A ``concurrent.futures.Future``: it works with ``wait`` and ``as_completed`` of that module,
    ``asyncio.wrap_future`` and callbacks (in the thread that drives the launches). It continues if nobody keeps the
    future, and ends with this process.

    Attributes:
        name: The function's, "train()".
        arguments: The function's arguments, by name.
        report: The LaunchReport; None before it is over.
        log_dir: Its directory in ``log_dir=``; None before it has begun.
        state: "waiting" (for devices, for those before it), "starting", "running", "returned", "failed" or "cancelled".
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], status: RunStatus) -> None:
        super().__init__()
        # Ctrl-C in result() may leave the usual one locked, and the thread that sets the result would hang.
        self._condition = interrupts.Condition()  # type: ignore[assignment]
        self._waiters = _Waiters(status)  # type: ignore[assignment]  # Future's own
        self.name, self.arguments = name, dict(arguments)
        self._status = status

    @property
    def report(self) -> LaunchReport | None:
        make = self._status.make_report
        return None if make is None else make()

    @property
    def log_dir(self) -> str | None:
        return self._status.log_dir

    @property
    def state(self) -> str:
        """Return "waiting", "starting", "running", "returned", "failed" or "cancelled"."""
        if not self.done():
            return "running" if self.running() else "starting" if self._status.starting else "waiting"
        return "cancelled" if self.cancelled() else "returned" if self.exception() is None else "failed"

    @property
    def reports(self) -> list[Reported]:
        """The reports of the ranks until now (``mlaunch.report``), 10,000 reports at most.

        If a rank reports more than 256 times between two reads, the latest 256 of these.
        """
        return self._status.reports.read()

    @property
    def latest(self) -> Reported | None:
        """The latest report of any rank."""
        return self._status.reports.latest()

    def on_report(self, callback: Callable[[Reported], object]) -> None:
        """Call back for each later report, within a tenth of a second, in the thread that drives launches.

        To prune: ``run.on_report(lambda report: report["loss"] > 10 and run.stop())``.
        """
        self._status.reports.tell(callback)
        self._status.notify()

    def __reduce__(self) -> NoReturn:
        raise TypeError("only the process that made this future can wait for it: pass its result()")

    @raises_from_caller
    def result(self, timeout: float | None = None) -> list[Any]:
        if not self.done():
            self._status.before_wait()
        return super().result(timeout)

    @raises_from_caller
    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._status.before_wait()
        return super().exception(timeout)

    def running(self) -> bool:
        """True if ranks were started for it and it is not over."""
        return self._status.runs and not self.done()

    @raises_from_caller
    def cancel(self) -> bool:
        """End the run, and return when its processes are gone; a run that waits starts none. Can be interrupted.

        In a callback, and in a thread that runs an event loop of asyncio (not a notebook's cell), it does not wait.

        Returns:
            True if this ended it; False if it was over, all ranks had returned, or one had failed. Where it does not
            wait: True if the run is asked to end.
        """
        if not self.done():
            self._status.check_process()
        self._status.ask_to_cancel()
        if loop.is_here() or (not self.done() and _stops_an_event_loop()):
            return self.cancelled() or not self.done()
        return self._wait_for_end()

    def _wait_for_end(self) -> bool:
        """Wait until its processes are gone; True if it was cancelled."""
        interrupts.wait(self._status.over.wait)
        return self.cancelled()

    def stacks(self) -> StacksOfRanks:
        """Return the present Python stacks of its ranks, by rank; none if it has not begun or is over.

        The ranks continue meanwhile. Printed, they are as ``mlaunch stacks`` shows them.
        """
        room, found = load.room("insight", "caller", "run.stacks()"), self._status.seen_as()
        name = None if found is None or self.done() else registry.name_of(*found)
        stacks: StacksOfRanks = room.stacks_of(name)
        return stacks

    def why(self) -> str:
        """Return which rank the others wait for, and what it does instead; "" if no ranks run."""
        room, found = load.room("insight", "caller", "run.why()"), self._status.seen_as()
        said: str = "" if found is None or self.done() else room.why_launch(found[0])
        return said

    def stop(self, reason: str = "asked") -> bool:
        """Ask the ranks to stop at a step that they agree on, where ``mlaunch.stopping`` returns the reason.

        Does not wait. The values become the result, as usual; ranks that do not call ``stopping`` are ended after
        ``stop_grace``. A run that has not begun gets the reason at its first call of ``stopping``, and is not
        restarted.

        Returns:
            True if it is not over.
        """
        if not self.done():
            self._status.check_process()
        self._status.stop_reason = self._status.stop_reason or reason
        self._status.notify()
        return not self.done()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        state = "done" if self.state in {"returned", "failed"} else self.state
        return f"<Run of {self.name.removesuffix('()')}({given}): {state}>"

    def _end(self, how: Ended | BaseException) -> None:
        """Set how it ended, or why it did not begin. It was pending until now: ``Future`` cancels nothing that runs."""
        error = how.error if isinstance(how, Ended) else how
        if isinstance(how, Ended):
            self._status.make_report = how.report
        if self._status.cancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None or not isinstance(how, Ended):
            self.set_exception(None if error is None else _without_locals(error))
        else:
            self.set_result(how.values)
        with self._condition:
            self._done_callbacks: list[Callable[[Future[list[Any]]], object]] = []  # which Future would keep

    def _invoke_callbacks(self) -> None:
        """Call the callbacks. The others, asyncio's among them, are called even after a ``sys.exit`` in one."""
        for callback in self._done_callbacks:
            try:
                callback(self)
            except BaseException:
                log.exception("a callback of a submitted launch raised")


class _Waiters(list[object]):
    """Future's list of its waiters: ``concurrent.futures.wait`` and ``as_completed`` append to it first."""

    def __init__(self, status: RunStatus) -> None:
        super().__init__()
        self._status = status

    def append(self, waiter: object) -> None:
        self._status.before_wait()
        super().append(waiter)


# The reports of its ranks (``mlaunch.report``)

_PERIOD = 0.1  # seconds between two reads, if there are callbacks
_KEPT = 10_000  # reports


@dataclass(frozen=True)
class Reported:
    """A report of one rank: ``reported["loss"]``."""

    rank: int
    step: int
    values: Mapping[str, float | int | str | bool | None]

    def __getitem__(self, name: str) -> float | int | str | bool | None:
        return self.values[name]


def report_in_words(reported: Reported | None) -> str:
    """Return a report in words: "step 3, loss 0.25"; "" for none."""
    if reported is None:
        return ""
    values = [f"{name} {f'{one:.6g}' if isinstance(one, float) else one}" for name, one in reported.values.items()]
    return ", ".join([f"step {reported.step}", *values])


class _Columns:
    """Reports of a run that is over, in a tenth of the memory: a sweep keeps those of all its runs.

    Reports with the same names are rows of one table; ``kinds`` has each report's table.
    """

    def __init__(self, reports: Sequence[Reported]) -> None:
        tables: dict[tuple[str, ...], list[Reported]] = {}
        for report in reports:
            tables.setdefault(tuple(report.values), []).append(report)
        numbers = {names: number for number, names in enumerate(tables)}
        self._kinds = _column([numbers[tuple(report.values)] for report in reports])
        self._ranks = _column([report.rank for report in reports])
        self._steps = _column([report.step for report in reports])
        self._tables = [
            (names, [_column([row.values[name] for row in rows]) for name in names]) for names, rows in tables.items()
        ]
        self.last = reports[-1] if reports else None  # a sweep's table needs it often

    def read(self) -> list[Reported]:
        rows = [zip(*columns, strict=True) for _, columns in self._tables]
        return [
            Reported(rank, step, dict(zip(self._tables[kind][0], next(rows[kind], ()), strict=True)))
            for kind, rank, step in zip(self._kinds, self._ranks, self._steps, strict=True)
        ]


def _column(values: Sequence[Any]) -> Sequence[Any]:
    """Return the same values; in few bytes if they are all numbers of one kind."""
    types = {type(value) for value in values}
    for code in "d" if types <= {float} else "BHq" if types <= {int} else "":
        with contextlib.suppress(OverflowError):
            return array(code, values)
    return values


class ReportLog:
    """The reports of one launch, of all its attempts. For any thread."""

    def __init__(self) -> None:
        self._lock = renewed(threading.RLock())
        # With the rank, and not parsed: most are never read.
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._over: _Columns | None = None  # in place of it, once nothing more comes
        self._not_passed_on: list[Reported] = []
        self._callbacks: list[Callable[[Reported], object]] = []
        self._board: Board | None = None
        self._first_rank = 0
        self._seen: list[int] = []  # how many of each rank

    def attach(self, board: Board | None, spec: LaunchSpec, before: Sequence[int] = ()) -> None:
        """Read from a board from now on. ``before``: how much each rank had reported there before this launch."""
        with self._lock:
            if board is not self._board:
                self._board, self._first_rank = board, spec.rank_start
                self._seen = [*before] or [0] * spec.local_world_size

    def detach(self) -> None:
        """Read what is left, and no more: the memory is about to go."""
        with self._lock:
            self._read_board()
            self._board = None

    def finish(self) -> None:
        """Drop callbacks and pack the reports: nothing more comes."""
        with self._lock:
            self._callbacks, self._not_passed_on, self._seen = [], [], []
            self._over = self._over or _Columns(list(self._parsed()))
            self._kept.clear()

    def tell(self, callback: Callable[[Reported], object]) -> None:
        """Call back for each later report."""
        with self._lock:
            self._read_board()
            self._callbacks.append(callback)

    def period(self, timeout: float | None) -> float | None:
        """Return the seconds until the next read; ``timeout``: until something else is due. None: never."""
        if not self._callbacks:
            return timeout
        return _PERIOD if timeout is None else min(timeout, _PERIOD)

    def pass_on(self) -> None:
        """Read, and call back. What a callback raises is logged."""
        with self._lock:
            self._read_board()
            found, self._not_passed_on = self._not_passed_on, []
            callbacks = list(self._callbacks)
        for callback in callbacks:
            for report in found:
                _call(callback, report)

    def read(self) -> list[Reported]:
        """Return all reports, in the order in which they came."""
        with self._lock:
            self._read_board()
            return self._over.read() if self._over is not None else list(self._parsed())

    def latest(self) -> Reported | None:
        """Return the latest report."""
        with self._lock:
            self._read_board()
            if self._over is not None:
                return self._over.last
            return next((report for rank, data in reversed(self._kept) for report in _parsed(rank, [data])), None)

    def _parsed(self) -> Iterator[Reported]:
        return (report for rank, data in self._kept for report in _parsed(rank, [data]))

    def _read_board(self) -> None:
        for local_rank, seen in enumerate(self._seen if self._board is not None else ()):
            try:
                found, self._seen[local_rank] = self._board.ring(local_rank).read(seen)  # type: ignore[union-attr]
            except ValueError:  # ranks that stayed have ended, and their memory is gone
                return
            rank = self._first_rank + local_rank
            self._kept += ((rank, data) for data in found)
            if self._callbacks:
                self._not_passed_on += _parsed(rank, found)


def _parsed(rank: int, found: Iterable[bytes]) -> Iterator[Reported]:
    for data in found:
        with contextlib.suppress(ValueError, TypeError):  # user code can write to the board, too
            step, values = json.loads(data)
            yield Reported(rank, step, dict(values))


def _call(callback: Callable[[Reported], object], report: Reported) -> None:
    try:
        callback(report)
    except BaseException:  # also sys.exit: the run and its caller continue
        log.exception("a callback of a report raised")


# Its state


def _nothing() -> None: ...


def found_as(handle: LaunchHandle) -> tuple[str, int]:
    """Return the ID and the first rank under which a launch is found by ``mlaunch ps`` and the like."""
    spec = handle.outcome.spec
    return handle.seen_as or spec.launch_id, spec.rank_start


@dataclass(eq=False)
class RunStatus:
    """The state of a run while it is driven."""

    surroundings: Context | None = None  # of the call; None: those at its beginning
    cancelling: bool = False  # somebody wants it to end
    cancelled: bool = False  # it ended by that
    stop_reason: str = ""  # why its ranks are to stop; "": nobody has asked
    starting: bool = False  # it has what it waits for: the fork server imports torch, or forks the agent
    runs: bool = False  # on ranks of its own, or that stay
    seen_as: Callable[[], tuple[str, int] | None] = _nothing  # its ID and first rank for ``mlaunch ps``
    log_dir: str | None = None
    make_report: Callable[[], LaunchReport] | None = None
    reports: ReportLog = field(default_factory=ReportLog)
    over: threading.Event = field(default_factory=threading.Event)
    has_followers: Callable[[], bool] = lambda: False  # True if others will wait for its devices
    begins: Callable[[], None] = _nothing  # called when it has what it waits for, before its ranks are started
    place: Callable[[], LivePlace | None] = _nothing  # for lines that change; None: it has its own
    trial: str = ""  # the label of its output among the trials of a sweep; "": it is not in one
    pid: int = field(default_factory=os.getpid)  # of the process that has submitted it
    row: deque[RunStatus] | None = None  # the runs that want the same devices, this one among them
    handle: LaunchHandle | None = None  # of its ranks, while they are driven
    asked: set[str] = field(default_factory=set)  # of these ranks: to "stop", to "end"
    _telling: int | None = None  # the thread that calls back for its reports

    def notify(self) -> None:
        loop.notify()

    def check_process(self) -> None:
        """Raise RuntimeError in a fork of the process that has submitted it: it never learns how the run ended."""
        if self.pid != os.getpid():
            raise RuntimeError(
                f"this run was submitted by process {self.pid}; this process is a fork of it: call it there"
            )

    def before_wait(self) -> None:
        """Let another thread drive if a callback is about to wait in the thread that drives.

        RuntimeError: it waits for the run that has called it, which continues only after that.
        """
        self.check_process()
        if self._telling == threading.get_ident():
            raise RuntimeError("a callback waits for the run that has called it, which continues only after that")
        loop.hand_over()

    def pass_reports_on(self) -> None:
        """Call back for what ranks have reported."""
        self._telling = threading.get_ident()
        try:
            self.reports.pass_on()
        finally:
            self._telling = None

    def environ(self, options: Options) -> dict[str, str]:
        """Return the environment of the moment at which it was submitted."""
        around = os.environ if self.surroundings is None else self.surroundings.environ
        return {**around, **(options.env or {})}

    def leaves_ranks(self) -> None:
        """Forget the ranks, which may be another run's next."""
        self.runs, self.seen_as = False, _nothing
        self.reports.detach()

    def ask_to_cancel(self) -> None:
        """Begin what ``Run.cancel`` does; do not wait for it."""
        self.cancelling = True
        self.notify()

    def finish(self) -> None:
        """Wake those that wait for its end, and drop what it no longer needs: users may keep many runs."""
        self.begins = self.place = _nothing
        self.surroundings = None
        self.reports.finish()
        self.over.set()


def _without_locals(error: BaseException) -> BaseException:
    """Return the error with the locals of its frames cleared: they would keep the launch's handle alive."""
    found = [error]
    for link in found:  # errors may be each other's cause, and have a user's __eq__
        traceback.clear_frames(link.__traceback__)
        for other in (link.__cause__, link.__context__):
            if other is not None and all(other is not known for known in found):
                found.append(other)
    return without_ours(error) if hides_our_frames(error) else error


# Frames that an event loop of asyncio, and a notebook's cell, run code in.
_HANDLE, _CELL = ("asyncio.events", "_run"), ("IPython.core.interactiveshell", "run_code")


def _stops_an_event_loop() -> bool:
    """True if a wait in this thread would stop an event loop; False in a notebook's cell, which stops it anyway.

    A cell, with all that it calls, runs in a step of the kernel's loop. Code that asyncio calls itself (a task's
    coroutine, the end of a timeout) has no cell between itself and the loop.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place in {_HANDLE, _CELL}:
            return place == _HANDLE
        frame = frame.f_back  # type: ignore[assignment]
    return True  # a loop of another library
