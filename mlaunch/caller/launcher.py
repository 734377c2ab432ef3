"""``@launcher``: run a function once per device, get the list of what each rank returned."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from mlaunch.base.errors import report_of
from mlaunch.caller import nesting
from mlaunch.caller.options import Options
from mlaunch.caller.report.launch_report import LaunchReport

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class launcher(Generic[P, R]):
    """Runs the decorated function once per device, each in its own process, inside an initialised process group.

    Usable bare (``@launcher``), with options (``@launcher(n_gpus=4)``) and on methods. Nothing starts when a
    function is decorated. A call blocks until every rank has ended and returns the list of this machine's ranks'
    return values, in the order of ranks. Several threads may call at once.

    Args:
        func: The function. It need not be importable: closures, lambdas and functions of notebooks travel too.
        n_gpus: Ranks on this machine. None: one per visible accelerator, without any one per CPU that this process
            may use.
        world_size: Ranks on all machines; None: ``n_gpus``.
        rank_start: The first rank of this machine.
        master_ip: The address of the machine with rank 0.
        port: The port of the rendezvous there; 0: chosen by the system.
        device_type: "auto" (the accelerator that torch was built for, or "cpu"), "cpu", "cuda", ...
        backend: The process group's backend; None: the device's own (nccl for cuda) plus gloo for CPU tensors.
        devices: Which accelerators, by number among the visible ones. Local rank i gets ``devices[i]`` and sees it
            as device i.
        timeout: Limit in seconds (or a timedelta) for each collective and for joining the group; None: no limit.
        grace_period: Seconds between SIGTERM and SIGKILL for ranks that are stopped.
        deadline: Limit in seconds for the whole call, restarts included, from the moment at which its ranks are
            started; None: no limit.
        max_restarts: How often all ranks are started again after a failure. Each time in a new process group, with
            ``TORCHELASTIC_RESTART_COUNT`` counting up and a warning that says why; the last failure is raised.
        start_method: "forkserver" (a warm process with torch imported; this process is not forked), "fork" (ranks
            inherit this process's memory; refused once an accelerator is initialised) or "spawn" (a fresh
            interpreter for each call).
        env: Environment variables to add for the ranks.
        seed: Seeds Python's, numpy's and torch's generators. A number: the same on all ranks; "per-rank": 1024 plus
            the rank; "per-rank:7": 7 plus the rank. None: each rank's torch generator gets a fresh seed.
        join: In a process that torchrun, srun or mpirun started as a rank, join the other ranks and run the function
            here, which gives a list of one value, instead of starting ranks. False: always start ranks.
        join_timeout: Seconds for the machines of a launch to come together.
        heartbeat_timeout: Seconds after which a machine that says nothing counts as lost.
        token: A secret that the machines of a launch share, and prove to each other before anything else. None: the
            environment's ``MLAUNCH_TOKEN``; without that too, whoever reaches the port may join.
        gather: "local": the list of this machine's ranks. "all": of all machines' ranks, by global rank, on each of
            them; needs a token, with which values are signed.
        output: What ranks print is shown here with their rank in front, ``[3]``, and once where several ranks print
            the same line: "all" of it, that of "rank0" alone, or "none"; "raw": ranks write to the streams of this
            process themselves.
        log_dir: A directory in which each call makes one of its own, with a file per attempt, rank and stream.
        progress: Shows a line that tells how far the launch is, in a notebook and on a terminal (needs the extra
            ``notebook`` there).

    Attributes:
        last: The LaunchReport of the latest call, also of one that failed; None before the first.

    Raises:
        TypeError: (when decorating) an option of a wrong type; (when calling) an argument that cannot be pickled.
        RuntimeError: It is called inside a rank of mlaunch, without ``join=False``.
        ValueError: an option with a value that is not allowed, or that this machine cannot serve.
        LaunchTimeout: The deadline passed.
        LaunchError: A rank was killed, exited with a code other than 0 or returned what cannot be pickled.
        Exception: What a rank raised is raised here, with a LaunchError as its ``__cause__``.

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
    _reports: list[LaunchReport]  # the latest; shared with the copies that ``options`` and methods make

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
        *,
        devices: Sequence[int] | None = ...,
        timeout: float | timedelta | None = ...,
        grace_period: float = ...,
        deadline: float | None = ...,
        max_restarts: int = ...,
        start_method: str = ...,
        env: Mapping[str, str] | None = ...,
        seed: int | str | None = ...,
        join: bool = ...,
        join_timeout: float = ...,
        heartbeat_timeout: float = ...,
        token: str | None = ...,
        gather: str = ...,
        output: str = ...,
        log_dir: str | os.PathLike[str] | None = ...,
        progress: bool = ...,
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
        *,
        devices: Sequence[int] | None = ...,
        timeout: float | timedelta | None = ...,
        grace_period: float = ...,
        deadline: float | None = ...,
        max_restarts: int = ...,
        start_method: str = ...,
        env: Mapping[str, str] | None = ...,
        seed: int | str | None = ...,
        join: bool = ...,
        join_timeout: float = ...,
        heartbeat_timeout: float = ...,
        token: str | None = ...,
        gather: str = ...,
        output: str = ...,
        log_dir: str | os.PathLike[str] | None = ...,
        progress: bool = ...,
    ) -> _Decorator: ...

    def __new__(cls, func: Callable[P, R] | None = None, *args: Any, **options: Any) -> Any:
        checked = Options().replaced(_by_name(args, options))
        if func is None:
            return functools.partial(_decorate, options=checked)
        return _decorate(func, checked)

    def options(self, **changes: Any) -> launcher[P, R]:
        """A copy with other options: ``train.options(n_gpus=2)(0.1)``. Takes the options of ``launcher``."""
        return _make(self._function, self._options.replaced(changes), self._bound, self._reports)

    @property
    def last(self) -> LaunchReport | None:
        """The report of the latest call; None before the first."""
        return self._reports[-1] if self._reports else None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Runs the function on every rank of this machine; see the class."""
        _refuse_in_bootstrap(self._name)
        place = nesting.place_to_join(self._options, self._name)
        arguments = (*self._bound, *args)
        if place is not None:
            return nesting.run_joined(self._options, place, self._function, arguments, kwargs)
        from mlaunch.caller.call import call_on_ranks  # here, so that importing the name stays cheap

        ended = call_on_ranks(self._options, self._function, arguments, kwargs)
        self._reports[:] = [ended.report]
        if ended.error is not None and report_of(ended.error) is not None:
            # It tells where it comes from; our own frames would only stand between that and the reader's code.
            raise ended.error.with_traceback(None) from ended.error.__cause__
        return ended.result()

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> launcher[P, R]: ...

    @overload
    def __get__(self: launcher[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> launcher[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _make(self._function, self._options, (instance,), self._reports)

    def __repr__(self) -> str:
        return f"<launcher of {self._name}(): {self._options}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        module = getattr(self, "__module__", None)
        found: Any = sys.modules.get(module) if module not in {None, "__main__"} else None
        for name in self._name.split("."):
            found = getattr(found, name, None)
        if found is self:
            return str(self._name)
        return _make, (self._function, self._options, self._bound)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__qualname__))


class _Decorator(Protocol):
    """What ``launcher(n_gpus=4)`` is: it takes the function."""

    def __call__(self, func: Callable[P, R], /) -> launcher[P, R]: ...


def _by_name(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    names = ("n_gpus", "world_size", "rank_start", "master_ip", "port", "device_type", "backend")
    if len(args) > len(names):
        raise TypeError(f"launcher takes the function and {len(names)} options by position ({', '.join(names)})")
    given = dict(zip(names, args, strict=False))
    twice = sorted(given.keys() & options.keys())
    if twice:
        raise TypeError(f"launcher got {', '.join(twice)} by position and by name")
    return {**given, **options}


def _decorate(func: Callable[P, R], options: Options) -> launcher[P, R]:
    if isinstance(func, classmethod | staticmethod) or not callable(func):
        hint = "; put @launcher below @classmethod or @staticmethod" if hasattr(func, "__func__") else ""
        raise TypeError(f"launcher decorates a function, not {func!r}{hint}")
    if inspect.iscoroutinefunction(func):
        raise TypeError(f"launcher decorates a function, not the coroutine function {func!r}; call asyncio.run in it")
    return _make(func, options)


def _make(
    function: Callable[P, R],
    options: Options,
    bound: tuple[Any, ...] = (),
    reports: list[LaunchReport] | None = None,
) -> launcher[P, R]:
    made: launcher[P, R] = object.__new__(launcher)
    wrapped = types.MethodType(function, bound[0]) if bound else function
    functools.update_wrapper(cast("Callable[..., Any]", made), wrapped, updated=())
    made._function, made._options, made._bound = function, options, bound
    made._reports = [] if reports is None else reports
    return made


def _refuse_in_bootstrap(name: str) -> None:
    # multiprocessing imports the main script anew in each process that it spawns, and sets this while it does.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"{name}() is called while multiprocessing imports this script into a process of its own; "
            f"put the call under if __name__ == '__main__':"
        )
