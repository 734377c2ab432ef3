"""``train.map`` and ``train.grid``: a launch for each value or combination, and their table.

All trials are futures from the beginning. Only one at a time waits for devices: when it has them, the next one gets in
line.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, TimeoutError  # of Python 3.10, a class of its own
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn, cast, overload

from mlaunch.base.exceptions import hides_our_frames, misuse
from mlaunch.base.fds import renewed
from mlaunch.base.log import log
from mlaunch.base.text import in_seconds, on_a_clock
from mlaunch.caller import checks, interrupts
from mlaunch.caller.launch.settle import Ended, add_note
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import LivePlace, live_place
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import raises_from_caller, without_ours
from mlaunch.core import load
from mlaunch.protocol.calls import Call
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import Run
from mlaunch.sweeps.caller.submitted_call import surroundings_of
from mlaunch.sweeps.caller.trial import (
    Trial,
    TrialPlan,
    arguments_of,
    given_in_words,
    given_names,
    in_words,
    labels,
    varying_names,
)
from mlaunch.sweeps.caller.trial_file import Done, TrialFile, canonical, keys_of

if TYPE_CHECKING:
    from mlaunch.display.caller.areas import SharedArea

_OVER = ("returned", "failed", "cancelled")
_SHOWN = 60  # rows, unless somebody asks for all
_LONGEST = 80  # characters of an error or of values


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
        return [_value_or_error(trial) if self._plan.goes_on else trial.result() for trial in self._trials]

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
                RuntimeError(
                    f"this sweep was begun by process {self._pid}; this process is a fork of it: call it there"
                )
            )

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each run: ``pandas.DataFrame(runs.rows())``.

        Its keys: arguments, defaults included; ``state``, ``seconds``; ``step`` and each name of the latest report;
        ``values``, of all ranks, with ``value``, rank 0's (a dict gives a column for each of its keys), or ``error``.
        A key that an argument has already gets "_" appended.
        """
        return [_row(trial) for trial in self._trials]

    def table(self) -> str:
        """Return the rows as a table, without the arguments that are the same in all."""
        return _text(self._trials)

    def __reduce__(self) -> NoReturn:
        raise TypeError("only the process that began this sweep can wait for it: pass its results")

    def __repr__(self) -> str:
        return _text(self._trials, _SHOWN)

    def _repr_html_(self) -> str:
        return _html(self._trials, _SHOWN)

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
            given = given_in_words(trial.given)
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
            log.warning("%s could not be written to the file of its sweep, and would run again: %s", trial.label, error)

    def _shared(self, place: LivePlace | None) -> SharedArea | None:
        """Return a place for lines of all trials, if this process has one."""
        if place is None:
            return None
        found: SharedArea = load.module_of("display", "caller.areas").SharedArea(place, self._total, self._begun)
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
        return _in_one_line(self._plan.name.rpartition(".")[2], self._trials, time.monotonic() - self._begun)

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
    keep_report: Callable[[Callable[[], LaunchReport]], None]
    goes_on: bool
    file: TrialFile | None = None

    def begin(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> Sweep:
        """Begin a launch for each (arguments, keyword arguments). TypeError for what the function does not take."""
        for args, kwargs in calls:
            checks.check_arguments(self.function, (*self.bound, *args), kwargs)
            checks.check_values(self.function, (*self.bound, *args), kwargs)
        sweep = Sweep(self, [Call(self.function, (*self.bound, *args), dict(kwargs)) for args, kwargs in calls])
        sweep.begin()
        return sweep

    def trials(self, calls: Sequence[Call], sweep: Sweep) -> list[Trial]:
        given = [given_names(self.function, len(self.bound), call.args, call.kwargs) for call in calls]
        keys = keys_of("" if self.file is None else canonical(arguments_of(call)) for call in calls)
        name, around = f"{self.name}()", surroundings_of(self.options)
        plans = zip(calls, given, labels(given), keys, strict=True)
        return [
            Trial(TrialPlan(name, self.options, call, known, label, self.keep_report, around, key, number), sweep)
            for number, (call, known, label, key) in enumerate(plans)
        ]


def _moment(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _value_or_error(trial: Trial) -> Any:
    return CancelledError() if trial.cancelled() else trial.exception() or trial.result()


# Its rows, and their table


def _row(trial: Trial) -> dict[str, Any]:
    """Return a trial's arguments, defaults included, and its outcome: as "state_" if an argument is named "state".

    What was reported and what rank 0 returned have columns of their own, to compute with.
    """
    found, outcome = dict(trial.arguments), _outcome(trial)
    last = {name: outcome.pop(name) for name in ("values", "error") if name in outcome}
    reported = outcome.pop("reported", {})
    for columns in (outcome, reported, _of_rank0(last.get("values")), last):
        for name, value in columns.items():
            free = name
            while free in found:
                free += "_"
            found[free] = value
    return found


def _of_rank0(values: Sequence[Any] | None) -> dict[str, Any]:
    """Return what rank 0 has returned as ``value``, or as a column for each of its keys."""
    if not values:
        return {}
    named = isinstance(values[0], dict) and all(isinstance(name, str) for name in values[0])
    return {name: _number(value) for name, value in (values[0] if named else {"value": values[0]}).items()}


def _number(value: Any) -> Any:
    """Return the number in a tensor of no dimension; anything else as it is."""
    torch = sys.modules.get("torch")
    return value.item() if torch is not None and isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _reason(error: BaseException) -> str:
    """Return in one line why a trial failed; if it hung, first who held it up."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kept = [line for line in others if line != "meanwhile:"]
    if kept and "had not returned" in first:
        first = f"{kept[0]}; {first}"
    return f"{type(error).__name__}: {first}"


def _outcome(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {"state": trial.state}
    if trial.seconds is not None:
        found["seconds"] = trial.seconds
    if trial.latest is not None:
        found["reported"] = {"step": trial.latest.step, **trial.latest.values}
    if trial.state == "returned":
        found["values"] = trial.result()
    elif trial.state == "failed":
        found["error"] = _reason(cast("BaseException", trial.exception()))
    return found


def _text(trials: Sequence[Trial], most: int | None = None) -> str:
    """Return the rows as text; if there are more than ``most``, the first ones and how many more there are."""
    lines = _cells(trials[:most])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*drawn, *_more(trials, most)])


def _html(trials: Sequence[Trial], most: int | None = None) -> str:
    """Return the same for a notebook."""
    head, *lines = _cells(trials[:most])
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    below = "".join(f"<p>{escape(line)}</p>" for line in _more(trials, most))
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{below}"


def _in_one_line(name: str, trials: Sequence[Trial], seconds: float) -> str:
    """Return how far a sweep is: "train: 6 of 12 done (1 of them failed), 4 running, 2 waiting  0:35"."""
    counts = Counter(trial.state for trial in trials)
    done = sum(counts[state] for state in _OVER)
    bad = ", ".join(f"{counts[state]} {state}" for state in _OVER[1:] if counts[state])
    of_them = f" ({bad.replace(' ', ' of them ', 1)})" if bad else ""
    others = "".join(f", {counts[state]} {state}" for state in ("starting", "running", "waiting") if counts[state])
    return f"{name}: {done} of {len(trials)} done{of_them}{others}  {on_a_clock(seconds)}"


def _more(trials: Sequence[Trial], most: int | None) -> list[str]:
    left = 0 if most is None else len(trials) - most
    return [f"and {left} more: table() has all"] if left > 0 else []


def _cells(trials: Sequence[Trial]) -> list[list[str]]:
    """Return the names of columns, then a line for each trial: arguments that differ between trials, and outcome."""
    given = [{name: in_words(value) for name, value in trial.given.items()} for trial in trials]
    found = [{name: _told(value) for name, value in _outcome(trial).items()} for trial in trials]
    arguments = varying_names(given)
    ours = [name for name in ("state", "seconds", "reported", "values", "error") if any(name in one for one in found)]
    lines = [
        [*(one.get(name, "") for name in arguments), *(other.get(name, "") for name in ours)]
        for one, other in zip(given, found, strict=True)
    ]
    return [[*arguments, *ours], *lines]


def _told(value: object) -> str:
    if isinstance(value, float):
        return in_seconds(value)
    parts: Iterable[str] = [str(value)]
    if isinstance(value, list):
        parts = map(_in_short, value)
    elif isinstance(value, dict):
        parts = (f"{name}={_in_short(part)}" for name, part in value.items())
    said = ", ".join(parts)
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."


def _in_short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else in_words(value)
