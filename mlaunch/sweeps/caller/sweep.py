"""``train.map`` and ``train.grid``: a launch for each value, or for each combination of values.

All trials are futures from the beginning. Only one at a time waits for devices: when it has them, the next one gets in
line.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, TimeoutError  # of Python 3.10, a class of its own
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, overload

from mlaunch.base.exceptions import hides_our_frames, misuse
from mlaunch.base.fds import renewed
from mlaunch.base.log import log
from mlaunch.caller import arguments, interrupts
from mlaunch.caller.launch.settle import Ended, add_note
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.live import LivePlace, live_place
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import raises_from_caller, without_ours
from mlaunch.core import load
from mlaunch.protocol.calls import Call
from mlaunch.sweeps.caller import sweep_table, trial_arguments
from mlaunch.sweeps.caller.identity import canonical
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import Run
from mlaunch.sweeps.caller.submitted_call import surroundings_of
from mlaunch.sweeps.caller.trial import Trial, TrialPlan, arguments_of
from mlaunch.sweeps.caller.trial_file import Done, TrialFile, keys_of

if TYPE_CHECKING:
    from mlaunch.display.caller.shared_area import SharedArea


class Sweep(Sequence[Run]):
    """The runs of a sweep, a ``Run`` each, in the order of their arguments. It continues in the background.

    Printed, also in a notebook, it is a table of arguments and values. Ctrl-C in ``results``, ``as_completed`` or a
    run's ``result`` ends all; what is done stays.
    """

    def __init__(self, plan: SweepPlan, calls: Sequence[Call]) -> None:
        self._plan = plan
        self._trials = plan.trials(calls, self)
        self._waiting: deque[Trial] = deque()
        self._ended: list[Trial] = []  # in the order in which they did
        self._changed = interrupts.Condition()
        self._failed: Trial | None = None  # the first one
        self._lock = renewed(threading.Lock())
        self._pid = os.getpid()
        self._begun = time.monotonic()
        self._area = self._shared(live_place(blocks=False) if plan.options.progress else None)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...

    def __getitem__(self, index: int | slice) -> Run | list[Run]:
        found: Run | list[Run] = self._trials[index]  # type: ignore[assignment]  # a list of trials is one of runs
        return found

    def __len__(self) -> int:
        return len(self._trials)

    def as_completed(self, timeout: float | None = None) -> Iterator[Run]:
        """Yield the runs as they end. ``timeout``: seconds for all of them.

        Raises:
            Exception: The first failure, once all others have been ended; not with ``return_exceptions=True``.
            TimeoutError: Not all have ended in time; they continue.
        """
        __tracebackhide__ = True
        try:
            yield from self._as_completed(timeout)
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__

    def _as_completed(self, timeout: float | None) -> Iterator[Run]:
        until, yielded = _moment(timeout), set[Trial]()
        # Read again each time: retry() replaces those that failed.
        while not yielded.issuperset(self._trials):
            self._wait(lambda: not yielded.issuperset(self._ended), until)
            with self._changed:
                trial = next((trial for trial in self._ended if trial not in yielded), None)
            if trial is None:  # another thread has called retry()
                continue
            if trial is self._failed and not self._plan.goes_on:
                self._raise_failure(until)
            yielded.add(trial)
            yield trial

    @raises_from_caller
    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for all, and return the list of values of each; raise as ``as_completed``.

        With ``return_exceptions=True``, exceptions are in the list; CancelledError for a run that was cancelled.
        """
        until = _moment(timeout)
        self._wait(lambda: len(self._ended) == len(self._trials), until)
        if self._failed is not None and not self._plan.goes_on:
            self._raise_failure(until)
        return [_outcome(trial) if self._plan.goes_on else trial.result() for trial in self._trials]

    @raises_from_caller
    def cancel(self) -> None:
        """End all that run, start none that wait, and return when their processes are gone."""
        if not all(trial.done() for trial in self._trials):
            self._check_process()
        # Ask all first: their grace periods then run at the same time.
        for trial in self._trials:
            trial.ask_to_cancel()
        for trial in self._trials:
            trial.cancel()

    def end(self) -> None:
        """Do what ``cancel`` does, and wait even in an event loop's thread: after an interrupt of a wait."""
        for trial in self._trials:
            trial.ask_to_cancel()
        for trial in self._trials:
            trial.end()

    def retry(self) -> Sweep:
        """Run again what failed or was cancelled, with new runs in the places of the old ones; return the sweep."""
        self._check_process()
        with self._changed:
            over = [trial for trial in self._ended if trial.state != "returned"]
        surroundings = surroundings_of(self._plan.options)
        again = {trial: trial.again(surroundings) for trial in over}
        done = self._look_up([*again.values()])  # it may raise: nothing has changed yet
        with self._changed:
            again = {
                trial: new for trial, new in again.items() if trial in self._ended
            }  # not if another retry() was faster
            self._trials = [again.get(trial, trial) for trial in self._trials]
            self._ended = [trial for trial in self._ended if trial not in again]
            if self._failed not in self._trials:
                self._failed = None
        self._begin([*again.values()], done)
        return self

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise misuse(
                RuntimeError(f"this sweep was begun by process {self._pid}, of which this one is a fork: ask there")
            )

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each run: ``pandas.DataFrame(runs.rows())``.

        Its keys: arguments, defaults included; ``state``, ``seconds``; ``step`` and each name of the latest report;
        ``values``, of all ranks, with ``value``, rank 0's (a dict gives a column for each of its keys), or ``error``.
        A key that an argument has already gets "_" appended.
        """
        return [sweep_table.row(trial) for trial in self._trials]

    def table(self) -> str:
        """Return the rows as a table, without the arguments that are the same in all."""
        return sweep_table.text(self._trials)

    def __reduce__(self) -> NoReturn:
        raise TypeError("only the process that began this sweep can wait for it: pass its results")

    def __repr__(self) -> str:
        return sweep_table.text(self._trials, sweep_table.SHOWN)

    def _repr_html_(self) -> str:
        return sweep_table.html(self._trials, sweep_table.SHOWN)

    def begin(self) -> None:
        """Begin all that is not done in the file. Errors as of ``TrialFile``."""
        self._begin(self._trials, self._look_up(self._trials))

    def _look_up(self, some: Sequence[Trial]) -> dict[Trial, Done]:
        """Return which of them are done in the file, with their values. Errors as of ``TrialFile``."""
        if self._plan.file is None or not some:
            return {}
        found = self._plan.file.look_up([trial.key for trial in some])
        return {trial: done for trial, done in zip(some, found, strict=True) if done is not None}

    def _begin(self, some: Sequence[Trial], done: Mapping[Trial, Done]) -> None:
        self._waiting += [trial for trial in some if trial not in done]
        for trial in some:
            if trial in done:
                trial.take(*done[trial])
        self._begin_next()

    def _begin_next(self) -> None:
        """Have the next trial wait for its devices."""
        begun = False
        while not begun:
            with self._lock:
                trial = self._waiting.popleft() if self._waiting else None
            begun = trial is None or trial.begin(self._begin_next)

    def ends(self, trial: Trial, how: Ended | BaseException) -> None:
        """Note that a trial has ended, before its future is done. The first failure may end all others."""
        error = how.error if isinstance(how, Ended) else how
        if isinstance(how, Ended) and error is None:
            self._keep(trial, how.values)
            return
        if error is not None:
            given = trial_arguments.given_in_words(trial.given)
            add_note(error, f"of the trial {trial.name.removesuffix('()')}({given})")
        if self._failed is None:
            self._failed = trial
            for other in [] if self._plan.goes_on else self._trials:
                other.ask_to_cancel()

    def _keep(self, trial: Trial, values: list[Any]) -> None:
        """Write the values into the file."""
        try:
            if self._plan.file is not None:
                self._plan.file.add(trial.key, values, trial.seconds)
        except Exception as error:  # a full disk; what a __reduce__ may raise
            log.warning("%s is not in the file of its sweep, and would be run again: %s", trial.label, error)

    def _shared(self, place: LivePlace | None) -> SharedArea | None:
        """Return a place for lines of all trials, if this process has one."""
        if place is None:
            return None
        found: SharedArea = load.module_of("display", "caller.shared_area").SharedArea(place, self._total, self._begun)
        return found

    def place(self, number: int) -> LivePlace | None:
        return None if self._area is None else self._area.part(number)

    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def has_ended(self, trial: Trial) -> None:
        try:
            if self._area is not None:
                self._area.settle()
        finally:
            with self._changed:
                self._ended.append(trial)
                if len(self._ended) == len(self._trials) and self._plan.file is not None:
                    self._plan.file.close()
                self._changed.notify_all()

    def _total(self) -> str:
        return sweep_table.in_one_line(self._plan.name.rpartition(".")[2], self._trials, time.monotonic() - self._begun)

    def _raise_failure(self, until: float) -> None:
        """Raise the first failure, when the processes of all others are gone."""
        failed = self._failed
        self._wait(lambda: len(self._ended) == len(self._trials), until)
        if failed is not None:
            failed.result()

    def _wait(self, is_so: Callable[[], bool], until: float) -> None:
        """Wait until something is so. TimeoutError; an interrupt ends all."""
        if not is_so():
            self._check_process()
        loop.hand_over()  # in a callback
        try:
            with self._changed:
                while not (found := is_so()) and (left := until - time.monotonic()) > 0:
                    self._changed.wait(None if math.isinf(left) else left)
        except BaseException as interrupt:
            self.end()
            done = sum(trial.state == "returned" for trial in self._trials)
            ended = f"the trials of {self._plan.name}() were interrupted"
            file = self._plan.file
            there = "" if file is None else f" in {file.path}: the same line of code, run again, continues from there"
            add_note(interrupt, f"{ended}; {done} of {len(self._trials)} had returned, and their values stay{there}")
            raise
        if not found:
            raise TimeoutError(f"{len(self._trials) - len(self._ended)} of {len(self._trials)} trials have not ended")


@dataclass(frozen=True)
class SweepPlan:
    """The common part of a sweep's trials. ``bound``: comes before the arguments: the instance of a method."""

    function: Callable[..., Any]
    bound: tuple[Any, ...]
    options: Options
    name: str
    keep_report: Callable[[LaunchReport], None]
    goes_on: bool
    file: TrialFile | None = None

    def begin(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> Sweep:
        """Begin a launch for each (arguments, keyword arguments). TypeError for what the function does not take."""
        for args, kwargs in calls:
            arguments.check(self.function, (*self.bound, *args), kwargs)
            arguments.check_values(self.function, (*self.bound, *args), kwargs)
        sweep = Sweep(self, [Call(self.function, (*self.bound, *args), dict(kwargs)) for args, kwargs in calls])
        sweep.begin()
        return sweep

    def trials(self, calls: Sequence[Call], sweep: Sweep) -> list[Trial]:
        given = [trial_arguments.given_names(self.function, len(self.bound), call.args, call.kwargs) for call in calls]
        keys = keys_of("" if self.file is None else canonical(arguments_of(call)) for call in calls)
        name, around = f"{self.name}()", surroundings_of(self.options)
        plans = zip(calls, given, trial_arguments.labels(given), keys, strict=True)
        return [
            Trial(TrialPlan(name, self.options, call, known, label, self.keep_report, around, key, number), sweep)
            for number, (call, known, label, key) in enumerate(plans)
        ]


def _moment(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _outcome(trial: Trial) -> Any:
    return CancelledError() if trial.cancelled() else trial.exception() or trial.result()
