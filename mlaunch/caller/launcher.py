"""``@launcher``: run a function once per device, get the list of what each rank returned."""

from __future__ import annotations

import functools
import inspect
import multiprocessing.reduction
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from mlaunch.base.exceptions import hides_our_frames
from mlaunch.caller import checks, interrupts
from mlaunch.caller.call_log import CallLog
from mlaunch.caller.options import option_text
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.user_frames import hide_ours, without_ours
from mlaunch.core import load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.options.option_types import AllOptions, KeywordOptions
    from mlaunch.caller.report.launch_report import LaunchReport
    from mlaunch.sweeps.caller import ManyCalls
    from mlaunch.sweeps.caller.run_future import Run
    from mlaunch.sweeps.caller.sweep import Sweep

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class launcher(Generic[P, R]):
    """A decorator that runs a function once per device, each in its own process, inside an initialised process group.

    Usable bare (``@launcher``), with options (``@launcher(n_gpus=4)``) and on methods. Nothing starts when a
    function is decorated. A call blocks until every rank has ended and returns the list of this machine's ranks'
    return values, in the order of ranks. Several threads may call at once.

    Args:
        func: The function. It need not be importable: closures, lambdas and functions of notebooks work, too.
        **options: The fields of ``mlaunch.caller.options.launch_options.Options``; at run time they are listed here.

    Attributes:
        last: The LaunchReport of the latest call, even if it failed; None before the first.
        history: The latest 20 reports, the latest last.

    Raises:
        TypeError: (when decorating) an option of a wrong type; (when calling) an argument that cannot be pickled, or
            that the function does not take.
        RuntimeError: It is called inside a rank of mlaunch, without ``join=False``.
        ValueError: an option with a value that is not allowed, or that this machine cannot provide.
        LaunchTimeout: The deadline passed.
        LaunchError: A rank was killed, exited with a code other than 0 or returned a value that cannot be pickled.
        Exception: A rank's exception is raised here, with a LaunchError as its ``__cause__``.

    Example:
        >>> @launcher(n_gpus=2)
        ... def double(x):
        ...     return 2 * x
        >>> double(21)
        [42, 42]
    """

    __wrapped__: Callable[P, R]
    _function: Callable[P, R]
    _options: Options
    _bound: tuple[Any, ...]  # the instance of a method, else empty
    _calls: CallLog  # shared with the copies that ``options`` and methods make
    __signature__: ClassVar[option_text.SignatureOfClass]

    @overload
    def __new__(
        cls,
        func: Callable[P, R],
        n_gpus: int | None = ...,
        world_size: int | None = ...,
        rank_start: int = ...,
        master_ip: str = ...,
        port: int = ...,
        device_type: str = ...,
        backend: str | None = ...,
        **options: Unpack[KeywordOptions],
    ) -> launcher[P, R]: ...

    @overload
    def __new__(  # type: ignore[misc]  # with options alone it makes a decorator, as functools.partial would
        cls,
        func: None = ...,
        n_gpus: int | None = ...,
        world_size: int | None = ...,
        rank_start: int = ...,
        master_ip: str = ...,
        port: int = ...,
        device_type: str = ...,
        backend: str | None = ...,
        **options: Unpack[KeywordOptions],
    ) -> _Decorator: ...

    def __new__(cls, func: Callable[P, R] | None = None, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        checked = _checked(Options(), args, options)
        if func is None:
            return functools.partial(_decorate, options=checked)
        return _decorate(func, checked)

    def options(self, **changes: Unpack[AllOptions]) -> launcher[P, R]:
        """Return a copy with other options: ``train.options(n_gpus=2)(0.1)``. Takes the options of ``launcher``."""
        __tracebackhide__ = True
        return _make(self._function, _checked(self._options, (), changes), self._bound, self._calls)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run the function on every rank of this machine; see the class."""
        __tracebackhide__ = True
        try:
            return self._run((*self._bound, *args), kwargs)
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__qualname__))

    @property
    def last(self) -> LaunchReport | None:
        """The report of the latest call; None before the first."""
        latest = self._calls.reports.copy()
        return latest[-1]() if latest else None

    @property
    def history(self) -> tuple[LaunchReport, ...]:
        """The reports of the latest 20 calls, the latest last."""
        return tuple(report() for report in self._calls.reports.copy())

    # Calls that return before the ranks do

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Run:
        """Begin a call without waiting for it; return its ``Run``, a Future of the list of values."""
        __tracebackhide__ = True
        return self._many("submit").submit(*args, **kwargs)

    def map(
        self,
        *iterables: Iterable[Any],
        devices: Sequence[int] | None = None,
        retries: int | None = None,
        return_exceptions: bool = False,
        resume: str | os.PathLike[str] | None = None,
    ) -> Sweep:
        """Begin a call for each value, or for each tuple of values of several iterables, as the builtin does.

        The calls wait for devices of their own (``lease``), so as many run at a time as there are devices for. The
        option ``deadline`` limits each of them: ``train.options(deadline=600).map(rates)``.

        Args:
            *iterables: The values of the first argument, of the second, and so on.
            devices: The option of that name: ``n_gpus`` of these for each call. None: as the options say, or any.
            retries: How often a failed call is started again: the option ``max_restarts``.
            return_exceptions: Continue after a failure, with exceptions in the place of values. Otherwise the first
                failure ends all calls.
            resume: A file with a line for each finished call. Calls that are in it already do not run again.

        Raises:
            TypeError: The function does not take such arguments.
            ValueError: An option that only a blocking call can have; a file of something else.
            OSError: The file cannot be read, or other users may have written to it.
        """
        __tracebackhide__ = True
        settings: dict[str, Any] = {"devices": devices, "retries": retries, "return_exceptions": return_exceptions}
        return self._many("map").map(*iterables, resume=resume, **settings)

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
        """Begin a call for each combination of the arguments' values: ``train.grid(lr=[0.1, 0.01], seed=range(3))``.

        The last argument changes fastest. Otherwise as ``map``, which also serves a function with a parameter of the
        same name as one of these before ``values``.

        Raises:
            TypeError: The function does not take such arguments, or a value is no list of values.
            ValueError: There is no combination, or an option that only a blocking call can have.
        """
        __tracebackhide__ = True
        settings: dict[str, Any] = {"devices": devices, "retries": retries, "return_exceptions": return_exceptions}
        return self._many("grid").grid(self.grid, values, resume=resume, **settings)

    def _many(self, method: str) -> ManyCalls:
        __tracebackhide__ = True
        room = load.room("sweeps", "caller", f"{self._name}.{method}()")
        made: ManyCalls = room.ManyCalls(self._function, self._bound, self._options, self._name, self._calls)
        return made

    def why(self) -> str:
        """Return which rank the others wait for, in a call of another thread; "" if none runs."""
        found: str = load.room("insight", "caller", f"{self._name}.why()").why_call(self._name)
        return found

    def watch(self) -> None:
        """Show a table of what each rank does in calls of other threads or submitted calls, until none runs.

        It is a display in a notebook's cell, and changing lines on a terminal. An interrupt ends it, not the calls.

        Raises:
            RuntimeError: There is neither notebook nor terminal.
            ImportError: On a terminal, without rich (extra: watch).
        """
        load.room("insight", "caller", f"{self._name}.watch()").watch_calls(self._name, self._calls)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[R]:
        __tracebackhide__ = True
        place = checks.place_to_join(self._options, self._name)
        checks.check_arguments(self._function, args, kwargs)
        if self._options.inline:
            from mlaunch.caller.inline import run_inline  # only for this

            return run_inline(self._options, self._name, self._function, args, kwargs)
        if place is not None:
            return checks.run_joined(self._options, place, self._function, args, kwargs)
        if self._options.start_method != "fork":
            checks.check_values(self._function, args, kwargs)
        self._calls.begin()
        try:
            ended = _make_call(self._options, self._function, args, kwargs)
        finally:
            self._calls.end()
        self._calls.reports.append(ended.report)
        try:
            return ended.result()
        finally:
            del ended  # breaks the traceback's cycle; see Ended.result

    @property
    def _wrapped_call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function that a call runs, and what comes before the arguments: the instance of a method."""
        return self._function, self._bound

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> launcher[P, R]: ...

    @overload
    def __get__(self: launcher[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> launcher[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _make(self._function, self._options, (instance,), self._calls)

    def __repr__(self) -> str:
        return option_text.representation(self._name, self, self._options)

    def __reduce__(self) -> str | tuple[Any, ...]:
        from mlaunch.protocol import reducers

        # In __main__ not by name: cloudpickle, and libraries with a copy of it, call this for processes with another
        # __main__. Multiprocessing's processes have the same, and _reduce_for_a_pool.
        if reducers.is_known(getattr(self, "__module__", None) or ""):
            return _reduce_for_a_pool(self)
        return _make, (self._function, self._options, self._bound)


def _reduce_for_a_pool(found: launcher[P, R]) -> str | tuple[Any, ...]:
    """Reduce it to its name, if it has one; methods, and copies with other options, to the launcher of that name."""
    named: Any = sys.modules.get(getattr(found, "__module__", ""))
    for name in found._name.split("."):
        named = getattr(named, name, None)
    if named is found:
        return str(found._name)
    if isinstance(named, launcher) and named._function is found._function:
        return _copy, (named, found._options, found._bound)
    return _make, (found._function, found._options, found._bound)


multiprocessing.reduction.ForkingPickler.register(launcher, _reduce_for_a_pool)
launcher.__doc__ = option_text.with_options(launcher.__doc__)
launcher.__signature__ = option_text.SignatureOfClass(option_text.signature_of_launcher())
vars(launcher)["options"].__signature__ = option_text.signature_of_changes()
_OWN_NAMES = frozenset({*dir(launcher), *launcher.__annotations__})


class _Decorator(Protocol):
    """The type of ``launcher(n_gpus=4)``, which takes the function."""

    def __call__(self, func: Callable[P, R], /) -> launcher[P, R]: ...


def _checked(options: Options, args: tuple[Any, ...], changes: Mapping[str, Any]) -> Options:
    """Return the options with changes. Errors are raised as if from the line of the call."""
    __tracebackhide__ = True
    try:
        return options.replaced(_by_name(args, changes))
    except (TypeError, ValueError) as error:
        raise without_ours(error) from None


def _by_name(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    names = option_text.positional()
    if len(args) > len(names):
        raise TypeError(f"launcher takes the function and {len(names)} options by position ({', '.join(names)})")
    given = dict(zip(names, args, strict=False))
    twice = sorted(given.keys() & options.keys())
    if twice:
        raise TypeError(f"launcher got {', '.join(twice)} by position and by name")
    return {**given, **options}


def _decorate(func: Callable[P, R], options: Options) -> launcher[P, R]:
    __tracebackhide__ = True
    if isinstance(func, classmethod | staticmethod) or not callable(func):
        hint = "; put @launcher below @classmethod or @staticmethod" if hasattr(func, "__func__") else ""
        hint = f"; for {func} ranks: @launcher(n_gpus={func})" if isinstance(func, int) else hint
        raise hide_ours(TypeError(f"launcher decorates a function, not {func!r}{hint}"))
    for kind, is_one in (("coroutine", inspect.iscoroutinefunction), ("async generator", inspect.isasyncgenfunction)):
        if is_one(func) or is_one(type(func).__call__):
            raise hide_ours(
                TypeError(f"launcher decorates a function, not the {kind} function {func!r}; call asyncio.run in it")
            )
    return _make(func, options)


def _copy(found: launcher[P, R], options: Options, bound: tuple[Any, ...]) -> launcher[P, R]:
    return _make(found._function, options, bound)


def _make(
    function: Callable[P, R], options: Options, bound: tuple[Any, ...] = (), log: CallLog | None = None
) -> launcher[P, R]:
    made: launcher[P, R] = object.__new__(launcher)
    wrapped = types.MethodType(function, bound[0]) if bound else function
    functools.update_wrapper(cast("Callable[..., Any]", made), wrapped, updated=())
    vars(made).update(_attributes(function))
    made._function, made._options, made._bound = function, options, bound
    made._calls = CallLog() if log is None else log
    return made


def _make_call(options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
    """Run the function where the options say: on new ranks, on ranks that stay, on an engine's machines."""
    # What makes calls is imported by the first one, so that importing the decorator stays cheap. Before Python 3.12 a
    # KeyboardInterrupt while a dataclass is made is raised as a RuntimeError, so the import is not interrupted.
    with interrupts.deferred():
        if options.engine is not None and options.keep is None:
            call: Callable[..., Ended] = options.engine.call
        elif options.ranks is not None or options.keep is not None:
            option = "ranks" if options.keep is None else "keep"
            asked = load.as_keyword(option, getattr(options, option))
            call = load.room("ranks", "caller.keep", asked).call_on_kept
        else:
            from mlaunch.caller.launch.call import call_on_ranks as call
    return call(options, function, args, kwargs)


def _attributes(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what decorators below have set on the function (pytest's marks), except the launcher's own names."""
    if not isinstance(function, types.FunctionType):
        return {}
    return {name: value for name, value in vars(function).items() if name not in _OWN_NAMES}
