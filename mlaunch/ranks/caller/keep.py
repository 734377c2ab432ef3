"""Ranks that decorated functions with ``keep=`` share: one set for equal options."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from mlaunch.base.fds import in_forks
from mlaunch.caller import interrupts
from mlaunch.caller.launch.call import acquired
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.caller.launch.start import with_restarts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import StartingLine
from mlaunch.caller.output.output_plan import place_of
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.caller.warm_server import warm_server
from mlaunch.core.records import Grant
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context
from mlaunch.rank import device
from mlaunch.ranks.caller.rank_set import ClosedError
from mlaunch.ranks.caller.ranks import Ranks, ranks_of

# Options of one call, or of the launcher: ranks need not have been started with them.
T = TypeVar("T")
_OF_A_CALL = {"deadline", "log_dir", "progress", "max_restarts", "seed", "keep", "ranks", "join"}


@dataclass
class _Set:
    ranks: Ranks
    environ: dict[str, str]
    cwd: str
    here: bool  # on this machine


@dataclass
class _Locks:
    """The locks: ``of_sets`` is held for a moment; one of ``of_making``, by key, while ranks are started.

    No lock is held while ranks end. A lock in ``of_making`` exists as long as a thread uses it.
    """

    of_sets: threading.Lock = field(default_factory=threading.Lock)
    of_making: weakref.WeakValueDictionary[str, threading.Lock] = field(default_factory=weakref.WeakValueDictionary)


_locks = _Locks()
_sets: dict[str, _Set] = {}
_leaving: list[tuple[str, _Set]] = []  # which a thread is closing


def _forget() -> None:
    """Forget the sets in a fork of the caller, which may use neither its parent's ranks nor locks taken there."""
    _locks.of_sets, _locks.of_making = threading.Lock(), weakref.WeakValueDictionary()
    _sets.clear()
    _leaving.clear()


in_forks(_forget)


def call_on_kept(
    options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Ended:
    """Run the function on the ranks that the options name, or that they share; return how the call ended."""
    if options.ranks is not None:
        return options.ranks.call(options, Call(function, args, kwargs))

    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"

    def attempt(number: Attempt) -> Steps:
        call = Call(function, args, kwargs, seed=options.seed)
        if not options.features:
            return on_shared(options, lambda ranks: ranks.call(options.replaced({"deadline": number.time_left}), call))
        return _on_granted(options.replaced({"deadline": number.time_left}), call, name)
        yield  # nothing: a call on ranks that stay waits in its own way

    return interrupts.carry_out(with_restarts(attempt, name, options.deadline, options.max_restarts, warn_caller))


def _on_granted(options: Options, call: Call, name: str) -> Ended:
    """Make the call on ranks kept for the resources that it is granted.

    It gives these back at its end; the ranks stay.
    """
    from mlaunch.core.load import CallerParts  # most calls do not need it

    environ, line = {**os.environ, **(options.env or {})}, StartingLine(name, place_of(options))
    with CallerParts(options) as parts:
        with line:
            free, server = Grant(options, environ), warm_server.get(environ)
            grant = acquired(parts, free, server, name, line.tell_wait, line.silence)
        try:
            own = options_of_ranks(grant)
            return on_shared(own, lambda ranks: ranks.call(own, call))
        finally:
            grant.give_back()


def options_of_ranks(grant: Grant) -> Options:
    """Return the options by which ranks that stay are known: each has what it holds in its environment."""
    own, options = {name: grant.environ[name] for name in grant.of_call}, grant.options
    return options.replaced({"env": {**(options.env or {}), **own}}) if own else options


def on_shared(options: Options, make: Callable[[Ranks], T], surroundings: Context | None = None) -> T:
    """Make a call on the ranks that these options share.

    ``surroundings``: those of the moment at which it was asked for; None: those of now.
    """
    while True:
        ranks = _shared(options, surroundings)
        try:
            return make(ranks)
        except ClosedError:
            if not ranks.closed:  # by code in a __reduce__, which has started others
                raise


def _shared(options: Options, surroundings: Context | None) -> Ranks:
    """Return the set for these options; a new one, if environment, working directory or the user's code changed."""
    own = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _OF_A_CALL}
    key = f"{id(options.engine)} {sorted(own.items())!r}"  # two engines may look alike
    while True:
        with _locks.of_sets:
            making = _locks.of_making.setdefault(key, threading.Lock())
        # One lock for each key: ranks with other options may start meanwhile, which takes seconds.
        with making:
            environ = {**(os.environ if surroundings is None else surroundings.environ), **(options.env or {})}
            cwd = os.getcwd() if surroundings is None else surroundings.cwd
            around = None if surroundings is None else dataclasses.replace(surroundings, environ=environ)
            found, in_the_way = _look(key, options, environ, cwd)
            if found is None and not in_the_way:
                found = _Set(ranks_of(own, options.keep, around), environ, cwd, here=options.engine is None)
                with _locks.of_sets:
                    _sets[key] = found
                found.ranks.when_over(functools.partial(_leave_out, key, weakref.ref(found)))
        if found is not None:
            found.ranks.stay(options.keep)  # among callers that share a set, the latest decides how long
            return found.ranks
        for one in in_the_way:  # without a lock: a call on one of them may run for long
            one[1].ranks.close()
            with _locks.of_sets:
                if one in _leaving:
                    _leaving.remove(one)


def _leave_out(key: str, over: weakref.ref[_Set]) -> None:
    """Remove a set that has ended: a sweep has as many as it has trials."""
    with _locks.of_sets:
        if key in _sets and _sets[key] is over():
            del _sets[key]


def _look(key: str, options: Options, environ: dict[str, str], cwd: str) -> tuple[_Set | None, list[tuple[str, _Set]]]:
    """Return the existing set, or else the sets that must end first: an older one, idle rivals, and those leaving."""
    with _locks.of_sets:
        found = _sets.get(key)
        if found is not None and (found.environ, found.cwd) == (environ, cwd) and not found.ranks.outdated:
            return found, []
        for name, other in list(_sets.items()):
            if name == key or (other.ranks.idle and _are_rivals(options, other)):
                _leaving.append((name, _sets.pop(name)))
        return None, [(name, other) for name, other in _leaving if name == key or _are_rivals(options, other)]


def _are_rivals(options: Options, other: _Set) -> bool:
    """True if they need the same accelerators, whose memory the new one needs; engines know their machines."""
    if options.engine is not None or not other.here:
        return False
    return meet(options, other.ranks.devices, {**os.environ, **(options.env or {})})


def meet(options: Options, taken: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True if ranks with these options would be on a device that is taken; also if that is unknown."""
    kind = taken[0].partition(":")[0]
    if kind == "cpu" or options.device_type not in {"auto", kind}:
        return False
    numbers = options.devices if options.devices is not None else options.n_gpus and range(options.n_gpus)
    if not numbers:
        return True
    runtime = "rocm" if kind == "cuda" and "HIP_VISIBLE_DEVICES" in environ else kind
    try:
        wanted = device.visible(runtime, numbers, environ).split(",")
    except IndexError:  # fewer are visible: the ranks will not be started
        return False
    names = [name.partition(":")[2] for name in taken]
    named_alike = {name.isdigit() for name in names} == {name.isdigit() for name in wanted}
    return not named_alike or not set(names).isdisjoint(wanted)
