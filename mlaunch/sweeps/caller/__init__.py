"""``submit``, ``map`` and ``grid`` of a decorated function: calls that return before their ranks do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mlaunch.base.exceptions import misuse
from mlaunch.caller import checks
from mlaunch.caller.call_log import CallLog
from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import hide_ours
from mlaunch.features import FEATURES
from mlaunch.protocol.calls import Call
from mlaunch.sweeps.caller import trial
from mlaunch.sweeps.caller.run_future import Run, RunStatus
from mlaunch.sweeps.caller.submitted_call import drive, surroundings_of
from mlaunch.sweeps.caller.sweep import Sweep, SweepPlan
from mlaunch.sweeps.caller.trial_file import TrialFile

# Options that only blocking calls have, with their defaults.
_BLOCKING_ONLY = {"max_preemptions": 0, "ranks": None, "start_method": "forkserver"}


@dataclass(frozen=True)
class ManyCalls:
    """The methods of one decorated function that return before its ranks do; ``launcher`` describes them.

    Attributes:
        function: The function itself.
        bound: The instance of a method, else empty.
        options: The launcher's.
        name: The function's, for people.
        log: The launcher's record of its calls.
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
            run = _submit(
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
            raise TypeError(f"{self.name}.map() without values; allowed: an iterable of values for each argument")
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
        """Begin a call for each combination of values. ``method``: the launcher's, with its options."""
        __tracebackhide__ = True
        try:
            trial.check_names(self.function, method)
            calls = [((), chosen) for chosen in trial.combinations(values)]
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
        options = _options_of_trials(self.options, self.name, method, devices, retries)
        file = None if resume is None else TrialFile(resume, self.name, self.function)
        return SweepPlan(
            self.function, self.bound, options, self.name, self.log.reports.append, return_exceptions, file
        )


def _submit(options: Options, call: Call, name: str, keep_report: Callable[[Callable[[], LaunchReport]], None]) -> Run:
    """Begin a call; return its future. Misuse is raised here, before anything starts.

    Raises:
        RuntimeError: This process is a rank already.
        TypeError: The function does not take these arguments.
        ValueError: An option that only blocking calls have.
    """
    _check(options, name, "submit")
    function = cast("Callable[..., Any]", call.function)
    checks.check_arguments(function, call.args, call.kwargs)
    checks.check_values(function, call.args, call.kwargs)
    given = trial.given_in_words(trial.given_names(function, 0, call.args, call.kwargs))
    starts = options.engine is None and not _waits(options)
    status = RunStatus(dataclasses.replace(surroundings_of(options), given=given), starting=starts)
    run = Run(f"{name}()", trial.named(function, call.args, call.kwargs), status)
    drive(run, status, options, call, keep_report)
    return run


def _check(options: Options, name: str, method: str) -> None:
    """Raise for options that a launch in the background cannot have; see ``_submit``. ``method``: the launcher's."""
    if checks.place_to_join(options, name) is not None:
        raise misuse(
            RuntimeError(
                f"{name}.{method}() in {checks.rank_of_process()}, which would join the other ranks and run the "
                f"function itself; allowed: a blocking call, or join=False"
            )
        )
    if options.inline:
        raise misuse(ValueError(f"inline=True with {method}(): allowed: a blocking call, which runs the function here"))
    if options.debug:
        raise misuse(ValueError(f"debug={options.debug!r} with {method}(): allowed: a blocking call"))
    for option, usual in {**_BLOCKING_ONLY, **{one.options[0]: None for one in FEATURES if one.one_call}}.items():
        if getattr(options, option) != usual:
            raise misuse(ValueError(f"{option}={getattr(options, option)!r} with {method}(): allowed: {usual!r}, or a "
                                    f"blocking call in a thread"))  # fmt: skip
    if options.engine is not None:
        held: Any = options.engine
        if not hasattr(held, "attempt"):
            raise misuse(ValueError(
                f"engine={options.engine!r} with {method}(): mlaunch does not know how many launches share its "
                f"machines; allowed: machines that it holds: `with engine.hold(...) as held:`, and engine=held"
            ))  # fmt: skip
        held.check_trial(options.machines)


def _waits(options: Options) -> bool:
    """True if the call may wait for devices before it starts."""
    return any("caller.acquire" in feature.hooks for feature in options.features)


def _options_of_trials(
    options: Options, name: str, method: str, devices: Sequence[int] | None, retries: int | None
) -> Options:
    """Return the options of each trial. ValueError or TypeError for wrong ones."""
    changes: dict[str, Any] = {} if devices is None else {"devices": devices}
    if retries is not None:
        changes["max_restarts"] = retries
    _check(options, name, method)
    try:
        if retries is not None:
            about("max_restarts").allowed.check("retries", retries)
        changed = options.replaced(changes)
        of_its_own = _waits(changed) or options.engine is not None  # an engine gives each launch its machines
        return changed if of_its_own else changed.replaced({"lease": True})
    except (TypeError, ValueError) as error:
        raise misuse(error) from None
