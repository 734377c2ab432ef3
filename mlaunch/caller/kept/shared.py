"""Ranks that decorated functions with ``keep=`` share: one set for equal options."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mlaunch.caller.kept.ranks import Ranks
from mlaunch.caller.options import Options
from mlaunch.caller.restarts import with_restarts
from mlaunch.caller.settle import Ended
from mlaunch.caller.warn import warn_caller
from mlaunch.protocol.calls import Call
from mlaunch.rank import device

# Of one call, or of the launcher: ranks need not have been started with them.
_OF_A_CALL = {"deadline", "log_dir", "progress", "max_restarts", "seed", "keep", "ranks", "join"}


@dataclass
class _Set:
    ranks: Ranks
    environ: dict[str, str]
    cwd: str
    here: bool  # on this machine


_lock = threading.Lock()
_sets: dict[str, _Set] = {}
os.register_at_fork(after_in_child=_sets.clear)  # a fork of the caller has no right to its parent's ranks


def call_on_kept(
    options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Ended:
    """Runs the function on the ranks that the options name, or that they share; returns how the call ended."""
    if options.ranks is not None:
        ended: Ended = options.ranks.call(options, Call(function, args, kwargs))
        return ended

    def attempt(time_left: float | None, _restart_count: int) -> Ended:
        call = Call(function, args, kwargs, seed=options.seed)
        return _shared(options).call(options.replaced({"deadline": time_left}), call)

    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    return with_restarts(attempt, name, options.deadline, options.max_restarts, warn_caller)


def _shared(options: Options) -> Ranks:
    """Returns the set for these options; a fresh one, if the environment or the working directory has changed."""
    own = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _OF_A_CALL}
    key = f"{id(options.engine)} {sorted(own.items())!r}"  # two engines may look alike
    with _lock:
        found = _sets.get(key)
        environ, cwd = dict(os.environ), os.getcwd()
        if found is not None and (found.environ, found.cwd) != (environ, cwd):
            _sets.pop(key).ranks.close()
            found = None
        if found is None:
            if options.engine is None:  # one that holds machines knows its own
                _end_rivals(options)
            found = _Set(Ranks(**own, idle_timeout=options.keep), environ, cwd, here=options.engine is None)
            _sets[key] = found
        found.ranks.stay(options.keep)  # of those who share a set, the latest says how long
        return found.ranks


def _end_rivals(options: Options) -> None:
    """Ends idle sets on the same accelerators, whose memory the new one needs."""
    for key, other in list(_sets.items()):
        if (
            other.here
            and other.ranks.idle
            and meet(options, other.ranks.devices, {**os.environ, **(options.env or {})})
        ):
            _sets.pop(key).ranks.close()


def meet(options: Options, taken: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tells whether ranks with these options would be on a device that is taken; True where that cannot be known."""
    kind = taken[0].partition(":")[0]
    if kind == "cpu" or options.device_type not in {"auto", kind}:
        return False
    numbers = options.devices if options.devices is not None else options.n_gpus and range(options.n_gpus)
    if not numbers:
        return True
    runtime = "rocm" if kind == "cuda" and "HIP_VISIBLE_DEVICES" in environ else kind
    try:
        wanted = device.visible(runtime, numbers, environ).split(",")
    except IndexError:  # fewer are visible: they will not be started
        return False
    names = [name.partition(":")[2] for name in taken]
    named_alike = {name.isdigit() for name in names} == {name.isdigit() for name in wanted}
    return not named_alike or not set(names).isdisjoint(wanted)
