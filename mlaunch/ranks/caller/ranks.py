"""``Ranks``: processes that stay between calls, with device, process group, modules and the objects they hold."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from mlaunch.base.exceptions import hides_our_frames, misuse
from mlaunch.base.text import with_article
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import warn_caller, without_ours
from mlaunch.core import load
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context
from mlaunch.rank import rank_imports
from mlaunch.ranks.caller.held import Held
from mlaunch.ranks.caller.kept_call import RanksFuture
from mlaunch.ranks.caller.rank_set import RankSet, check_ranks
from mlaunch.ranks.rank import held_objects

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mlaunch.caller.options.option_types import AllOptions
    from mlaunch.cells.caller import CellResult, Cells


class Ranks:
    """One process per device that stays between calls, inside one process group.

    What a call leaves in its ranks is there in the next one: modules, CUDA contexts, communicators, and what ``hold``
    keeps. Calls run one after the other, in the order in which they are made, on all ranks. Several threads may call.

    If a call raises, passes its deadline or is interrupted, only the call ends, if that is possible: KeyboardInterrupt
    is raised in ranks that still work, and once all have come back, mlaunch checks that each has entered the same
    operations of each process group. If so, the ranks and what they hold stay. Otherwise they are ended, which the
    error's note says, and the next call starts new ones.

    Args:
        restart: Start new ranks for the next call when these are lost. False: that call raises ``RanksLost``.
        idle_timeout: Seconds without a call after which the ranks end; the next call starts new ones. None: never.
        **options: Those of ``launcher``, except ``max_restarts``, ``world_size`` and ``rank_start``. ``deadline`` and
            ``log_dir`` count for each call. With ``engine`` the ranks are on its machines.

    Raises:
        ValueError, TypeError: An option is wrong, or asks for something that this machine does not have.
        LaunchError: The engine does not give machines, or other ranks that stay have taken them.
        RuntimeError: This process is a rank itself.

    Example:
        >>> with Ranks(n_gpus=4) as ranks:
        ...     model = ranks.hold(build, "7b")
        ...     losses = ranks.run(step, model, scatter(batches), lr=0.1)
    """

    def __init__(
        self, *, restart: bool = True, idle_timeout: float | None = None, **options: Unpack[AllOptions]
    ) -> None:
        __tracebackhide__ = True
        try:
            self._have(RankSet(_checked(options, idle_timeout), restart=restart, idle_timeout=idle_timeout))
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__

    def _have(self, ranks: RankSet) -> None:
        self._set = ranks
        weakref.finalize(self, ranks.abandon).atexit = False

    # Calls

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function on every rank, after the calls before it; return their values in the order of ranks.

        Raises:
            Exception: What a call of a decorated function raises; a note says what has become of the ranks.
            RanksLost: The ranks are gone, and ``restart`` is False.
            RuntimeError: The ranks were closed.
        """
        __tracebackhide__ = True
        function, args = _unwrapped(function, args)
        try:
            ours = self._set
            return ours.run(ours.options, Call(function, args, kwargs))[1].result()
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RanksFuture:
        """Queue the call and return the future of the list that ``run`` returns; ``future.report`` reports on it."""
        __tracebackhide__ = True
        function, args = _unwrapped(function, args)
        ours = self._set
        try:
            future = ours.submit(ours.options, Call(function, args, kwargs))
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__
        future.add_done_callback(ours.note)  # not the call's method: it holds the future
        return future

    def hold(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Held:
        """Run the function on every rank and keep its result there; return the handle of these objects."""
        __tracebackhide__ = True
        if not callable(function) or _is_model(function):
            kind = with_article(type(function).__name__)
            raise misuse(TypeError(f"hold() takes a function that makes the object, not {kind}; to hold one that is "
                                   f"here: hold(lambda: it)"))  # fmt: skip
        function, args = _unwrapped(function, args)
        number = self._set.next_number()
        try:
            owner, ended = self._set.run(self._set.options, Call(function, args, kwargs, held=number))
            return Held(self, owner, number, ended.result())
        except BaseException as error:
            self._set.free_later(self.owner, number)  # some ranks may hold it
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__

    def reload(self) -> list[str]:
        """Reload the user's modules whose files have changed, on all ranks or, if that fails on one, on none.

        A reload cannot change existing objects: a held object keeps its old class, and a warning names it. Names that
        other modules have imported with ``from module import name`` stay as they were, too.

        Returns:
            The names of the modules.

        Raises:
            RuntimeError: A module failed on some rank; all ranks have the code that they had.
        """
        told = self.run(rank_imports.reload_changed)
        failed = [(rank, text) for rank, (_, text) in enumerate(told) if text]
        if failed:
            self.run(rank_imports.undo_reload)
            rank, text = failed[0]
            raise RuntimeError(
                f"nothing was reloaded: rank {rank} failed:\n{text.rstrip()}\nfix the module, and reload again"
            )
        old = sorted({number for numbers in self.run(held_objects.finish_reload) for number in numbers})
        self._set.told_stale.clear()
        self._set.outdated = False
        if old:
            which = ", ".join(map(str, old))
            warn_caller(
                f"the held values {which} keep their classes from before the reload; hold them again to change that"
            )
        return sorted({name for names, _ in told for name in names})

    # Cells

    @functools.cached_property
    def cells(self) -> Cells:
        """Return the cells of these ranks, which the magics of a notebook use."""
        found: Cells = load.room("cells", "caller", "cells on ranks").Cells(self._set)
        return found

    def cell(
        self, source: str, *, targets: Sequence[int] | None = None, deadline: float | None = None, rich: str = "first"
    ) -> CellResult:
        """Run source text on the ranks as a notebook's cell, in a namespace that they keep between cells.

        Args:
            source: Python; with IPython on the ranks also ``!commands`` and ``%magics``.
            targets: The ranks on which it runs. None: all.
            deadline: For this cell, in seconds. None: that of the ranks.
            rich: The ranks whose figures and other rich output come back: the "first" of the targets, or "all".

        Returns:
            The value of the last expression, to be shown; once if all ranks have the same, otherwise by rank.

        Raises:
            SyntaxError: The text is none of these.
            Exception: What a rank raised, as ``run`` raises it.
        """
        __tracebackhide__ = True
        try:
            return self.cells.cell(source, targets, deadline, rich)
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise error.with_traceback(None) from error.__cause__

    def pull(self, name: str, *, targets: Sequence[int] | None = None) -> list[Any]:
        """Return the values of a name that cells have set, in the order of ranks; of the targets, if given.

        Raises:
            NameError: Some of these ranks have no such name.
        """
        __tracebackhide__ = True
        try:
            return self.cells.pull(name, targets)
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise error.with_traceback(None) from error.__cause__

    def push(self, values: Mapping[str, Any], *, targets: Sequence[int] | None = None) -> None:
        """Set names in the namespace of the ranks' cells; of the targets, if given."""
        __tracebackhide__ = True
        try:
            self.cells.push(values, targets)
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise error.with_traceback(None) from error.__cause__

    # The ranks

    @property
    def last(self) -> LaunchReport | None:
        """The report of the latest call that is over; None before the first."""
        latest = self._set.reports.copy()
        return latest[-1]() if latest else None

    @property
    def history(self) -> tuple[LaunchReport, ...]:
        """The reports of the latest 20 calls, the latest last."""
        return tuple(report() for report in self._set.reports.copy())

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._set.launch.handle.idle_spec.world_size

    @property
    def devices(self) -> tuple[str, ...]:
        """The ranks' devices by the machine's numbers, such as "cuda:2" or "cpu"."""
        spec = self._set.launch.handle.idle_spec
        return tuple(spec.device(local_rank) for local_rank in range(spec.local_world_size))

    @property
    def idle(self) -> bool:
        """True if no call runs or waits."""
        return self._set.launch.idle

    def stop(self) -> bool:
        """Ask the ranks to stop in the call that runs, at a step that they agree on: see ``mlaunch.stopping``.

        Does not wait. The call returns as usual; if it does not check, it ends after ``stop_grace``. For any thread.

        Returns:
            True if a call runs.
        """
        from mlaunch.core.load import room  # most programs do not need it

        call = self._set.launch.present
        if call is not None:
            room("agreed_stop", "caller", "Ranks.stop()").ask_to_stop(call, "asked")
        return call is not None

    def close(self, *, cancel_futures: bool = False) -> None:
        """End the ranks after the calls that were submitted. May be called again.

        Args:
            cancel_futures: Cancel the calls that have not begun, as an executor's ``shutdown`` does. The one that runs
                is waited for; ``terminate`` ends that, too.
        """
        self._set.close(wait=True, cancel=cancel_futures)

    def terminate(self) -> None:
        """End the ranks at once, and the call that runs with them, as Ctrl-C would. May be called again."""
        self._set.close(wait=False)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.terminate()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "only the process that made these ranks can call them: call them there, and pass what they return"
        )

    def __repr__(self) -> str:
        over = self._set.launch.over
        state = "closed" if self._set.closed else "gone" if over else "idle" if self.idle else "running"
        return f"<Ranks: {self.world_size} on {', '.join(dict.fromkeys(self.devices))}, {state}>"

    # For launchers and handles

    def call(self, options: Options, call: Call) -> Ended:
        """Make a call and wait for it; only those of the options count that belong to a call."""
        return self._set.run(options, call)[1]

    def begin(self, options: Options, call: Call, future: RanksFuture) -> None:
        """Queue a call with ``future`` as its future; only those of the options count that belong to a call."""
        self._set.submit(options, call, future)
        future.add_done_callback(self._set.note)

    def stay(self, seconds: float | None) -> None:
        """Change ``idle_timeout``, from the next call on."""
        self._set.stay(seconds)

    def when_over(self, forget: Callable[[], None]) -> None:
        """Call ``forget`` when the ranks have ended by ``idle_timeout`` or with a call: they are closed then."""
        self._set.when_over(forget)

    @property
    def outdated(self) -> bool:
        """True if they run older code than the user's files hold, and the user was warned."""
        return self._set.outdated

    @property
    def closed(self) -> bool:
        """True if they accept no more calls."""
        return self._set.closed

    @property
    def owner(self) -> str:
        """The ID of their present launch; "" if they are gone."""
        return "" if self._set.launch.over else self._set.launch.launch_id

    @property
    def free_later(self) -> Callable[[str, int], None]:
        """Return the function that makes the next call free a held object; it may run in any thread."""
        return self._set.free_later


def ranks_of(options: Mapping[str, Any], idle_timeout: float | None, surroundings: Context | None) -> Ranks:
    """Start ranks, in the surroundings of the moment at which they were asked for; None: those of now."""
    made = object.__new__(Ranks)
    checked = _checked(options, idle_timeout)
    made._have(RankSet(checked, restart=True, idle_timeout=idle_timeout, surroundings=surroundings))
    return made


def check(options: Mapping[str, Any]) -> None:
    """Raise what ``Ranks(**options)`` would if the options are wrong; start no ranks."""
    of_launch = {name: value for name, value in options.items() if name not in {"restart", "idle_timeout"}}
    check_ranks(_checked(of_launch, options.get("idle_timeout")))


def _checked(options: Mapping[str, Any], idle_timeout: float | None) -> Options:
    """Return the options; errors in them are raised as from the line of the user that gave them."""
    try:
        about("keep").allowed.check("idle_timeout", idle_timeout)
        return Options().replaced(options)
    except (TypeError, ValueError) as error:
        raise misuse(error) from None


def _is_model(function: Callable[..., Any]) -> bool:
    """True if it is a module of torch, whose call would be its forward. A class of modules is not one: it makes one."""
    return not isinstance(function, type) and hasattr(function, "state_dict")


def _unwrapped(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what a decorated function wraps, and the arguments with the instance of a method."""
    if isinstance(function, MethodType) and hasattr(type(function.__func__), "_wrapped_call"):
        return _unwrapped(function.__func__, (function.__self__, *args))  # a class method, from Python 3.13 on
    wrapped = getattr(function, "_wrapped_call", None) if hasattr(type(function), "_wrapped_call") else None
    return (wrapped[0], (*wrapped[1], *args)) if wrapped is not None else (function, tuple(args))
