"""What a decorated function does besides blocking calls: launches that go on by themselves, and many of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlaunch.caller.call_log import CallLog
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.user_frames import hide_ours
from mlaunch.protocol.calls import Call
from mlaunch.sweeps.caller import trial_arguments
from mlaunch.sweeps.caller.run_future import Run
from mlaunch.sweeps.caller.submit import options_of_trials, submit
from mlaunch.sweeps.caller.sweep import Sweep, SweepPlan
from mlaunch.sweeps.caller.trial_file import TrialFile


@dataclass(frozen=True)
class ManyCalls:
    """The methods of one decorated function that return before its ranks do; ``launcher`` describes them.

    Attributes:
        function: The function itself.
        bound: The instance of a method, else empty.
        options: The launcher's.
        name: The function's, for people.
        log: What the launcher knows of its calls.
    """

    function: Callable[..., Any]
    bound: tuple[Any, ...]
    options: Options
    name: str
    log: CallLog

    def submit(self, /, *args: Any, **kwargs: Any) -> Run:
        """Begin a call, and return its future."""
        __tracebackhide__ = True
        self.log.begin()
        try:
            run = submit(
                self.options, Call(self.function, (*self.bound, *args), kwargs), self.name, self.log.reports.append
            )
        except BaseException:
            self.log.end()
            raise
        run.add_done_callback(self.log.end)
        return run

    def map(self, *iterables: Iterable[Any], **settings: Any) -> Sweep:
        """Begin a call for each value, or for each tuple of values of several iterables."""
        __tracebackhide__ = True
        if not iterables:
            raise TypeError(f"{self.name}.map() of nothing; allowed: an iterable of values for each argument")
        if lacking := [values for values in iterables if not isinstance(values, Iterable)]:
            raise TypeError(
                f"{self.name}.map({lacking[0]!r}): allowed: an iterable of values for each argument, [{lacking[0]!r}]"
            )
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(values, {}) for values in zip(*iterables)]  # noqa: B905 - as the builtin, up to the shortest
        try:
            return self._plan("map", **settings).begin(calls)
        except BaseException as error:
            hide_ours(error)
            raise

    def grid(self, method: Callable[..., Any], values: dict[str, Iterable[Any]], **settings: Any) -> Sweep:
        """Begin a call for each combination of values. ``method``: the user's, whose parameters are no arguments."""
        __tracebackhide__ = True
        try:
            trial_arguments.check_names(self.function, method)
            calls = [((), chosen) for chosen in trial_arguments.combinations(values)]
            return self._plan("grid", **settings).begin(calls)
        except BaseException as error:
            hide_ours(error)
            raise

    def _plan(
        self,
        method: str,
        *,
        devices: Sequence[int] | None,
        retries: int | None,
        return_exceptions: bool,
        resume: str | os.PathLike[str] | None,
    ) -> SweepPlan:
        options = options_of_trials(self.options, self.name, method, devices, retries)
        file = None if resume is None else TrialFile(resume, self.name, self.function)
        return SweepPlan(
            self.function, self.bound, options, self.name, self.log.reports.append, return_exceptions, file
        )
