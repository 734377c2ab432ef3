"""The checks before a call of a decorated function: may this process start ranks, and do the arguments fit.

A process that torchrun, srun, mpirun or submitit has started joins the other ranks and runs the function itself. A
rank of mlaunch refuses: each rank would start as many ranks again, which is hardly ever meant.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from types import FunctionType, GeneratorType
from typing import Any

from mlaunch.base import seeding
from mlaunch.base.exceptions import misuse
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol import this_rank
from mlaunch.rank.launcher_variables import RankInfo, recognise


def place_to_join(options: Options, name: str) -> RankInfo | None:
    """Return the place of this process, if a call must not start ranks of its own; None: it starts them.

    Raises:
        RuntimeError: This process is a rank of mlaunch, or multiprocessing is importing the script into it.
        ValueError: It is a rank of another launcher, with another world size than the options ask for.
    """
    # multiprocessing imports the main script in each process that it spawns, and sets this while it does.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise misuse(
            RuntimeError(
                f"{name}() is called while multiprocessing imports this script into a process of its own; "
                f"put the call under if __name__ == '__main__':"
            )
        )
    if not options.join:
        return None
    rank = this_rank.this_rank
    if rank is not None:
        raise misuse(
            RuntimeError(
                f"{name}() is called inside rank {rank.rank} of {rank.function}, which is launched already. To "
                f"run it in this rank only, call {name}.__wrapped__(...); to start new ranks from here, decorate it "
                f"with @launcher(..., join=False)"
            )
        )
    place = recognise(os.environ) if options.engine is None else None  # an engine places ranks elsewhere
    if place is not None and place.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None  # variables for a group of one, set by hand in a notebook
    if place is None or options.world_size in {None, place.world_size}:
        return place
    if place.launcher == "srun":  # one task per machine, each of which starts that machine's ranks
        return None
    raise misuse(
        ValueError(
            f"world_size={options.world_size}, but {place.launcher} started this process as rank {place.rank} of "
            f"{place.world_size}, and {name}() would join those; allowed: {place.world_size}, None, or join=False"
        )
    )


def rank_of_process() -> str:
    """Return which rank this process is: "rank 0 of train()", "rank 3 of srun"; "" if it is none."""
    rank, place = this_rank.this_rank, recognise(os.environ)
    if rank is not None:
        return f"rank {rank.rank} of {rank.function}"
    if place is None or (place.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ):
        return ""
    return f"rank {place.rank} of {place.launcher}"


def run_joined(
    options: Options, place: RankInfo, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Join the other ranks, unless an earlier call did, and run the function here; return a list of one value."""
    import torch.distributed as dist

    from mlaunch.rank.become_rank import become_rank

    for feature in options.features:
        if feature.instead:
            given = f"{feature.options[0]}={getattr(options, feature.options[0])!r}"
            raise misuse(ValueError(f"{given} in {rank_of_process()}, which mlaunch has not started; allowed: "
                                    f"{feature.instead}, or join=False"))  # fmt: skip
    if not dist.is_initialized():
        become_rank(place, backend=options.backend, timeout=options.timeout_seconds)
    if options.seed is not None:
        seeding.apply(seeding.of_rank(options.seed, place.rank))
    value = function(*args, **kwargs)
    return [value if options.results == "all" or place.rank == 0 else None]


# Do the arguments fit

_HINTS = {
    "rank": "torch.distributed.get_rank()",
    "local_rank": "mlaunch.comm.get_local_rank()",
    "world_size": "torch.distributed.get_world_size()",
}
_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError, as the call itself would raise, if the function does not take these arguments.

    Only a plain function is checked, by its own parameters: what a decorator claims to take may be wrong.
    """
    if isinstance(function, FunctionType) and function.__code__.co_flags & _ASYNCHRONOUS:
        raise misuse(TypeError(
            f"{function.__qualname__}() is a coroutine function or an async generator function, which a rank does not "
            f"run to its end; call asyncio.run in a plain function"
        ))  # fmt: skip
    if isinstance(function, FunctionType) and function.__code__.co_flags & inspect.CO_GENERATOR:
        raise misuse(TypeError(
            f"{function.__qualname__}() is a generator function: each rank would return a generator, which cannot be "
            f"pickled; return a list of its items, or call it in a function that does"
        ))  # fmt: skip
    if not isinstance(function, FunctionType) or hasattr(function, "__signature__"):
        return
    code, optional = function.__code__, len(function.__defaults__ or ())
    plain = not kwargs and code.co_kwonlyargcount == 0
    if plain and code.co_argcount - optional <= len(args) <= code.co_argcount:
        return  # they fit for certain; a closer check would cost a short call too much
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        raise misuse(TypeError(f"{function.__qualname__}() {_wrong(signature, args, kwargs)}")) from None


def check_values(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for a generator, which cannot be pickled; one inside another value is found later."""
    for which, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, GeneratorType):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise misuse(TypeError(
                f"argument {which!r} of {name}() is a generator, which cannot be pickled: pass a list of its items, or "
                f"create it in the function, which each rank runs"
            ))  # fmt: skip


def _wrong(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments: that some are missing, if nothing else is."""
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        return _of_others(str(error), signature, len(args))
    wanted = [one for one in signature.parameters.values() if one.kind not in _REST]
    missing = [one for one in wanted if one.default is Parameter.empty and one.name not in given]
    return _of_missing(missing) + _hint(wanted)


def _of_missing(missing: Sequence[Parameter]) -> str:
    """Return "missing 2 required positional arguments: 'rank' and 'world_size'"; keyword-only ones come last."""
    found = [one for one in missing if one.kind is not Parameter.KEYWORD_ONLY]
    kind = "positional" if found else "keyword-only"
    names = [repr(one.name) for one in found or missing]
    many = "s" * (len(names) != 1)
    if len(names) <= 2:
        return f"missing {len(names)} required {kind} argument{many}: {' and '.join(names)}"
    return f"missing {len(names)} required {kind} argument{many}: {', '.join(names[:-1])}, and {names[-1]}"


def _of_option(said: str) -> str:
    """Return where to give the unexpected argument, if it is an option of the launcher; else ""."""
    name = said.rpartition("keyword argument ")[2].strip("'")
    if name not in (one.name for one in fields(Options)):
        return ""
    return f"; it is an option of launcher: @launcher({name}=...), or .options({name}=...) before the call"


def _of_others(said: str, signature: inspect.Signature, given: int) -> str:
    """Return an error of ``inspect`` about arguments in Python's words."""
    if said != "too many positional arguments":
        return f"got {said}" if said.startswith("multiple") else f"{said}{_of_option(said)}"
    takes = [one for one in signature.parameters.values() if one.kind in _POSITIONAL]
    least = sum(one.default is Parameter.empty for one in takes)
    number = str(least) if least == len(takes) else f"from {least} to {len(takes)}"
    many = "s" * (len(takes) != 1)
    return f"takes {number} positional argument{many} but {given} {'were' if given > 1 else 'was'} given"


def _hint(wanted: Sequence[Parameter]) -> str:
    """Return where a rank's number comes from, if the function wants it as an argument; else ""."""
    calls = [_HINTS[one.name] for one in wanted if one.name in _HINTS and one.default is Parameter.empty]
    if not calls:
        return ""
    return f"; unlike torch.multiprocessing.spawn, mlaunch passes no rank: in the function, call {' and '.join(calls)}"
