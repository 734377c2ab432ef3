"""Submits a call: checks it in the caller's frame, and leaves the rest to the thread that drives."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from mlaunch.base.misuse import misuse
from mlaunch.caller import arguments, nesting
from mlaunch.caller.launch.plan import context_of
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.features import FEATURES
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context
from mlaunch.sweeps.caller import trial_arguments
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import Run, RunCourse
from mlaunch.sweeps.caller.submitted_call import attempt_here, steps_of

_ELSEWHERE = {"max_preemptions": 0, "ranks": None, "start_method": "forkserver"}


def submit(options: Options, call: Call, name: str, keep_report: Callable[[LaunchReport], None]) -> Run:
    """Begins a call; returns its future. What is wrong with it is raised here, before anything starts.

    Raises:
        RuntimeError: This process is a rank already.
        TypeError: The function does not take these arguments.
        ValueError: An option that goes with blocking calls alone.
    """
    check(options, name, "submit")
    function = cast("Callable[..., Any]", call.function)
    arguments.check(function, call.args, call.kwargs)
    arguments.check_values(function, call.args, call.kwargs)
    given = trial_arguments.given_in_words(trial_arguments.given_names(function, 0, call.args, call.kwargs))
    starts = options.engine is None and not waits(options)
    course = RunCourse(loop, dataclasses.replace(surroundings_of(options), given=given), starting=starts)
    run = Run(f"{name}()", named(function, call.args, call.kwargs), course)
    drive(run, course, options, call, keep_report)
    return run


def check(options: Options, name: str, method: str) -> None:
    """Raises what is wrong with a launch that is to go on by itself; see ``submit``. ``method``: of the launcher."""
    nesting.refuse_in_bootstrap(name)
    if nesting.place_to_join(options, name) is not None:
        raise misuse(
            RuntimeError(
                f"{name}.{method}() in {nesting.rank_of_process()}, which would join the other ranks and run the "
                f"function itself; allowed: a blocking call, or join=False"
            )
        )
    if options.inline:
        raise misuse(ValueError(f"inline=True with {method}(): allowed: a blocking call, which runs the function here"))
    if options.debug:
        raise misuse(ValueError(f"debug={options.debug!r} with {method}(): allowed: a blocking call"))
    for option, usual in {**_ELSEWHERE, **{one.options[0]: None for one in FEATURES if one.one_call}}.items():
        if getattr(options, option) != usual:
            raise misuse(ValueError(f"{option}={getattr(options, option)!r} with {method}(): allowed: {usual!r}, or a "
                                    f"blocking call in a thread"))  # fmt: skip
    if options.engine is not None:
        held: Any = options.engine
        if not hasattr(held, "attempt"):
            raise misuse(ValueError(
                f"engine={options.engine!r} with {method}(): nobody says how many launches its machines are for; "
                f"allowed: machines that it holds: `with engine.hold(...) as held:`, and engine=held"
            ))  # fmt: skip
        held.check_trial(options.machines)


def waits(options: Options) -> bool:
    """True if the call may wait for something before it starts."""
    return any(feature.waits for feature in options.features)


def surroundings_of(options: Options) -> Context:
    """Return all that a call takes over from this process now: ranks start later, when that may have changed."""
    return context_of({**os.environ, **(options.env or {})})


def options_of_trials(
    options: Options, name: str, method: str, devices: Sequence[int] | None, retries: int | None
) -> Options:
    """Returns them as each trial has them. ValueError, TypeError for what is wrong with them."""
    changes: dict[str, Any] = {} if devices is None else {"devices": devices}
    if retries is not None:
        changes["max_restarts"] = retries
    check(options, name, method)
    try:
        if retries is not None:
            about("max_restarts").allowed.check("retries", retries)
        changed = options.replaced(changes)
        of_its_own = waits(changed) or options.engine is not None  # which gives each launch its machines
        return changed if of_its_own else changed.replaced({"lease": True})
    except (TypeError, ValueError) as error:
        raise misuse(error) from None


def drive(
    run: Run, course: RunCourse, options: Options, call: Call, keep_report: Callable[[LaunchReport], None]
) -> None:
    """Leaves a run to the thread that drives them all."""

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


def named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, with the defaults filled in; by number where the function does not say."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)
