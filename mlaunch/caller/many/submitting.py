"""What a decorated function does besides blocking calls: launches that go on by themselves, and many of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import hide_ours

if TYPE_CHECKING:
    from mlaunch.caller.call_log import CallLog
    from mlaunch.caller.many.run_future import Run
    from mlaunch.caller.many.sweep import Sweep, SweepPlan

P = ParamSpec("P")
R = TypeVar("R")


class Submitting(Generic[P, R]):
    """The part of ``launcher`` that returns before the ranks do."""

    _function: Callable[P, R]
    _options: Options
    _bound: tuple[Any, ...]  # the instance of a method, else empty
    _calls: CallLog  # shared with the copies that ``options`` and methods make

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__qualname__))

    @property
    def last(self) -> LaunchReport | None:
        """The report of the latest call; None before the first."""
        return self._calls.reports[-1] if self._calls.reports else None

    @property
    def history(self) -> tuple[LaunchReport, ...]:
        """The reports of the latest 20 calls, the latest last."""
        return tuple(self._calls.reports)

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Run:
        """Begins a call without waiting for it: returns its ``Run``, a Future of the list of values."""
        __tracebackhide__ = True
        from mlaunch.caller.many.submit import submit
        from mlaunch.protocol.calls import Call

        call = Call(self._function, (*self._bound, *args), kwargs)
        self._calls.begin()
        try:
            run = submit(self._options, call, self._name, self._calls.reports.append)
        except BaseException:
            self._calls.end()
            raise
        run.add_done_callback(self._calls.end)
        return run

    def map(
        self,
        *iterables: Iterable[Any],
        devices: Sequence[int] | None = None,
        retries: int | None = None,
        return_exceptions: bool = False,
        resume: str | os.PathLike[str] | None = None,
    ) -> Sweep:
        """Begins a call for each value, or for each tuple of values of several iterables, as the builtin does.

        The calls wait for devices of their own (``lease``), so as many run at a time as there are devices for. The
        option ``deadline`` limits each of them: ``train.options(deadline=600).map(rates)``.

        Args:
            *iterables: The values of the first argument, of the second, and so on.
            devices: The option of that name: ``n_gpus`` of these for each call. None: as the options say, or any.
            retries: How often a call is started again that has failed; the option ``max_restarts``.
            return_exceptions: Goes on after a failure, and gives exceptions in the place of values. Otherwise the first
                failure ends all calls.
            resume: A file with a line for each call that is done. Those that stand there already are not run again.

        Raises:
            TypeError: The function does not take such arguments.
            ValueError: An option that goes with blocking calls alone; a file of something else.
            OSError: The file cannot be read, or may hold what others have written.
        """
        __tracebackhide__ = True
        if not iterables:
            raise TypeError(f"{self._name}.map() of nothing; allowed: an iterable of values for each argument")
        if lacking := [values for values in iterables if not isinstance(values, Iterable)]:
            raise TypeError(
                f"{self._name}.map({lacking[0]!r}): allowed: an iterable of values for each argument, [{lacking[0]!r}]"
            )
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(values, {}) for values in zip(*iterables)]  # noqa: B905 - as the builtin, up to the shortest
        try:
            return self._plan("map", devices, retries, return_exceptions, resume).begin(calls)
        except BaseException as error:
            hide_ours(error)
            raise

    def grid(
        self,
        /,
        *,
        devices: Sequence[int] | None = None,
        retries: int | None = None,
        return_exceptions: bool = False,
        resume: str | os.PathLike[str] | None = None,
        **values: Iterable[Any],
    ) -> Sweep:
        """Begins a call for each combination of the arguments' values: ``train.grid(lr=[0.1, 0.01], seed=range(3))``.

        The last argument changes fastest. Else as ``map``, to which belongs a function whose parameters have the names
        of what stands here before ``values``.

        Raises:
            TypeError: The function does not take such arguments, or a value is no list of values.
            ValueError: There is no combination, or an option goes with blocking calls alone.
        """
        __tracebackhide__ = True
        from mlaunch.caller.many import trial_arguments

        try:
            trial_arguments.check_names(self._function, self.grid)
            calls = [((), chosen) for chosen in trial_arguments.combinations(values)]
            return self._plan("grid", devices, retries, return_exceptions, resume).begin(calls)
        except BaseException as error:
            hide_ours(error)
            raise

    def _plan(
        self,
        method: str,
        devices: Sequence[int] | None,
        retries: int | None,
        goes_on: bool,
        resume: str | os.PathLike[str] | None,
    ) -> SweepPlan:
        from mlaunch.caller.many.submit import options_of_trials
        from mlaunch.caller.many.sweep import SweepPlan
        from mlaunch.caller.many.trial_file import TrialFile

        options = options_of_trials(self._options, self._name, method, devices, retries)
        file = None if resume is None else TrialFile(resume, self._name, self._function)
        return SweepPlan(self._function, self._bound, options, self._name, self._calls.reports.append, goes_on, file)
