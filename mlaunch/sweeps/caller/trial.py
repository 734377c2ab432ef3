"""A trial, which is one run of a sweep: its arguments, its label and its future."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mlaunch.base.exceptions import misuse
from mlaunch.base.fds import renewed
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import LivePlace
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import raises_from_caller
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import Run, RunStatus
from mlaunch.sweeps.caller.submitted_call import drive
from mlaunch.sweeps.caller.trial_file import TrialKey, says_all_of_itself

_LONGEST_VALUE = 24  # characters
_LONGEST = 60
_LONGEST_LINE = 100
_PRINTED = 4096  # bytes of each rank's output that are kept with a trial: a sweep may have thousands


# Its arguments


def combinations(values: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Return each combination; the last name changes fastest. TypeError, or ValueError if there is none."""
    lists = {name: _listed(name, some) for name, some in values.items()}
    empty = [name for name, some in lists.items() if not some]
    if not lists or empty:
        raise misuse(ValueError(f"grid({empty[0] + '=[]' if empty else ''}): there is nothing to combine; "
                                f"allowed: at least one value for each argument, lr=[0.1, 0.01]"))  # fmt: skip
    return [dict(zip(lists, some, strict=True)) for some in itertools.product(*lists.values())]


def _listed(name: str, some: object) -> list[Any]:
    if isinstance(some, str | bytes) or not isinstance(some, Iterable):
        raise misuse(TypeError(f"grid({name}={some!r}): allowed: the values to try, {name}=[{some!r}]"))
    return list(some)


def check_names(function: Callable[..., Any], grid: Callable[..., Any]) -> None:
    """Raise TypeError for a function with a parameter that is an option of ``grid``."""
    own = {one.name for one in inspect.signature(grid).parameters.values() if one.kind is one.KEYWORD_ONLY}
    try:
        both = sorted(own & inspect.signature(function).parameters.keys())
    except (TypeError, ValueError):
        return
    if both:
        raise misuse(TypeError(f"grid() of a function with the parameter {both[0]!r}, which is an option of grid(); "
                               f"allowed: map(), or another name"))  # fmt: skip


def given_names(
    function: Callable[..., Any], bound: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, without defaults and the first ``bound``; by number if there is no signature."""
    try:
        names = [*inspect.signature(function).bind(*args, **kwargs).arguments.items()]
    except (TypeError, ValueError):
        names = [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]
    return dict(names[bound:])


def named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults included; by number if the function has no signature."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def given_in_words(given: Mapping[str, object]) -> str:
    """Return the arguments of a call in one line: "lr=0.1, width=64"."""
    said = ", ".join(f"{name}={in_words(value)}" for name, value in given.items())
    return said if len(said) <= _LONGEST_LINE else f"{said[: _LONGEST_LINE - 3]}..."


def labels(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a few words for each trial, in which they differ: "lr=0.1 width=64"; its number if they do not."""
    texts = [{name: in_words(value) for name, value in trial.items()} for trial in trials]
    varying = varying_names(texts)
    found = [" ".join(f"{name}={text[name]}" for name in varying if name in text) for text in texts]
    if len(set(found)) == len(found) and all(0 < len(label) <= _LONGEST for label in found):
        return found
    return [f"#{number}" for number in range(len(found))]


def varying_names(texts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of arguments that are not the same in all trials; all names if there are none."""
    names = list(dict.fromkeys(name for text in texts for name in text))
    return [name for name in names if len({text.get(name) for text in texts}) > 1] or names


def in_words(value: object) -> str:
    """Return a value in few characters: "0.1", "'adam'", "Size.BIG", "float32", ".../data/train.csv", "<Tensor>"."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if says_all_of_itself(value):
        return str(value)
    if isinstance(value, os.PathLike):
        text = os.fsdecode(value)
        return text if len(text) <= _LONGEST_VALUE else f"...{text[3 - _LONGEST_VALUE :]}"  # its end tells it apart
    if isinstance(value, str | bytes | tuple | list | dict | set | None):
        text = repr(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    return str(getattr(value, "__qualname__", None) or f"<{type(value).__qualname__}>")


# Its future


class SweepOfTrials(Protocol):
    """The sweep, as its trials use it."""

    def ends(self, trial: Trial, how: Ended | BaseException) -> None:
        """Note that a trial has ended, just before its future is done; not if it was cancelled."""

    def place(self, number: int) -> LivePlace | None:
        """Return where lines of the trial with this number can change."""

    def has_ended(self, trial: Trial) -> None:
        """Note that its future is done, before its callbacks."""

    def has_waiting(self) -> bool:
        """True if trials wait that are not in line yet."""

    def end(self) -> None:
        """End all, and wait for that."""


@dataclass(frozen=True)
class TrialPlan:
    """A trial's call. ``given``: its arguments without defaults; ``label``: in which it differs from the others.

    ``key``: under which it is in the sweep's file.
    """

    name: str  # the function's, "train()"
    options: Options
    call: Call
    given: Mapping[str, Any]
    label: str
    keep_report: Callable[[Callable[[], LaunchReport]], None]
    surroundings: Context  # at the time of map(), grid() or retry()
    key: TrialKey
    number: int  # its place among the trials


class Trial(Run):
    """One run of a sweep. It is in line for its devices once somebody begins it, or wants it to end."""

    def __init__(self, plan: TrialPlan, sweep: SweepOfTrials) -> None:
        place = functools.partial(sweep.place, plan.number)
        around = dataclasses.replace(plan.surroundings, given=given_in_words(plan.given))
        status = RunStatus(around, place=place, trial=plan.label)
        super().__init__(plan.name, arguments_of(plan.call), status)
        status.begins, status.has_followers = self._go_on, sweep.has_waiting
        self.given, self.label, self.key = plan.given, plan.label, plan.key
        self._plan, self._sweep = plan, sweep
        self._lock = renewed(threading.Lock())
        self._is_driven = False
        self._then: Callable[[], None] | None = None
        self._begun: float | None = None  # in monotonic seconds
        self.seconds: float | None = None  # that it took, once it is over

    def begin(self, then: Callable[[], None] | None = None) -> bool:
        """Get in line; False if it was before. ``then`` is called once it is no longer in line."""
        with self._lock:
            if self._is_driven:
                return False
            self._is_driven, self._then = True, then
        drive(self, self._status, self._plan.options, self._plan.call, self._plan.keep_report)
        return True

    def take(self, values: list[Any], seconds: float | None) -> None:
        """Set the values of an earlier sweep, instead of running it."""
        self._is_driven, self.seconds = True, seconds
        self._status.finish()
        self.set_result(values)

    def ask_to_cancel(self) -> None:
        """Begin what ``cancel`` does; do not wait for it."""
        self._status.cancelling = True
        self.begin()
        self._status.notify()

    def cancel(self) -> bool:
        if not self.done():
            self._status.check_process()
            self.ask_to_cancel()
        return super().cancel()

    def end(self) -> None:
        """Do what ``cancel`` does, and wait for the end, unless in a callback."""
        self.ask_to_cancel()
        if not loop.is_here():
            self._wait_for_end()

    @raises_from_caller
    def result(self, timeout: float | None = None) -> list[Any]:
        try:
            return super().result(timeout)
        except KeyboardInterrupt:
            if not self.done():  # so the exception is not the run's
                self._sweep.end()
            raise

    def again(self, surroundings: Context) -> Trial:
        """Return a new trial of the same call."""
        return Trial(dataclasses.replace(self._plan, surroundings=surroundings), self._sweep)

    def _go_on(self) -> None:
        self._begun = self._begun or time.monotonic()  # of the first attempt
        with self._lock:
            then, self._then = self._then, None
        if then is not None:
            then()

    def _end(self, how: Ended | BaseException) -> None:
        self.seconds = None if self._begun is None else time.monotonic() - self._begun
        self._go_on()
        if not self._status.cancelled:
            self._sweep.ends(self, how)
        super()._end(_to_keep(how))

    def _invoke_callbacks(self) -> None:
        try:
            self._sweep.has_ended(self)  # before: a callback may wait for the whole sweep
        finally:
            super()._invoke_callbacks()


def _to_keep(how: Ended | BaseException) -> Ended | BaseException:
    """Return how a trial ended, with only the end of what its ranks printed."""
    if not isinstance(how, Ended):
        return how
    report = how.report()
    if report.printed is not None:
        ends = {rank: _last_lines(printed) for rank, printed in report.printed.items()}
        report = dataclasses.replace(report, printed=ends)
    return dataclasses.replace(how, report=lambda: report)


def _last_lines(printed: bytes) -> bytes:
    return printed if len(printed) <= _PRINTED else printed[-_PRINTED:].partition(b"\n")[2] or printed[-_PRINTED:]


def arguments_of(call: Call) -> dict[str, Any]:
    """Return a call's arguments by name, defaults included."""
    return named(cast("Callable[..., Any]", call.function), call.args, call.kwargs)
