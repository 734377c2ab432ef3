"""The check that arguments fit the function, before any rank starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from types import FunctionType, GeneratorType
from typing import Any

from mlaunch.base.exceptions import misuse
from mlaunch.caller.options.launch_options import Options

_HINTS = {
    "rank": "torch.distributed.get_rank()",
    "local_rank": "mlaunch.comm.get_local_rank()",
    "world_size": "torch.distributed.get_world_size()",
}
_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
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
    if (
        not isinstance(function, FunctionType)
        or hasattr(function, "__signature__")
        or _clearly_fit(function, args, kwargs)
    ):
        return
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


def _clearly_fit(function: FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the arguments fit for certain; a closer check would cost a short call too much."""
    code, optional = function.__code__, len(function.__defaults__ or ())
    plain = not kwargs and code.co_kwonlyargcount == 0
    return plain and code.co_argcount - optional <= len(args) <= code.co_argcount


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
