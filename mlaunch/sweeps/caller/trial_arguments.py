"""The arguments of a sweep's trials, and labels by which people tell the trials apart."""

from __future__ import annotations

import enum
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlaunch.base.exceptions import misuse
from mlaunch.sweeps.caller.identity import says_all_of_itself

_LONGEST_VALUE = 24  # characters
_LONGEST = 60
_LONGEST_LINE = 100


def combinations(values: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Return each combination; the last name changes fastest. TypeError, or ValueError if there is none."""
    lists = {name: _listed(name, some) for name, some in values.items()}
    empty = [name for name, some in lists.items() if not some]
    if not lists or empty:
        raise misuse(ValueError(f"grid({empty[0] + '=[]' if empty else ''}): a grid of nothing; allowed: at least one "
                                f"value for each argument, lr=[0.1, 0.01]"))  # fmt: skip
    return [dict(zip(lists, some, strict=True)) for some in itertools.product(*lists.values())]


def _listed(name: str, some: object) -> list[Any]:
    if isinstance(some, str | bytes) or not isinstance(some, Iterable):
        raise misuse(TypeError(f"grid({name}={some!r}): allowed: the values to try, {name}=[{some!r}]"))
    return list(some)


def check_names(function: Callable[..., Any], grid: Callable[..., Any]) -> None:
    """Raise TypeError for a function with a parameter that is an option of ``grid``."""
    own = {one.name for one in inspect.signature(grid).parameters.values() if one.kind is one.KEYWORD_ONLY}
    try:
        both = sorted(own & inspect.signature(function).parameters.keys())
    except (TypeError, ValueError):
        return
    if both:
        raise misuse(TypeError(f"grid() of a function with the parameter {both[0]!r}, which is an option of grid(); "
                               f"allowed: map(), or another name"))  # fmt: skip


def given_names(
    function: Callable[..., Any], bound: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, without defaults and the first ``bound``; by number if there is no signature."""
    try:
        names = [*inspect.signature(function).bind(*args, **kwargs).arguments.items()]
    except (TypeError, ValueError):
        names = [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]
    return dict(names[bound:])


def named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults included; by number if the function has no signature."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def given_in_words(given: Mapping[str, object]) -> str:
    """Return the arguments of a call in one line: "lr=0.1, width=64"."""
    said = ", ".join(f"{name}={in_words(value)}" for name, value in given.items())
    return said if len(said) <= _LONGEST_LINE else f"{said[: _LONGEST_LINE - 3]}..."


def labels(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a few words for each trial, in which they differ: "lr=0.1 width=64"; its number if they do not."""
    texts = [{name: in_words(value) for name, value in trial.items()} for trial in trials]
    varying = varying_names(texts)
    found = [" ".join(f"{name}={text[name]}" for name in varying if name in text) for text in texts]
    if len(set(found)) == len(found) and all(0 < len(label) <= _LONGEST for label in found):
        return found
    return [f"#{number}" for number in range(len(found))]


def varying_names(texts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of arguments that are not the same in all trials; all names if there are none."""
    names = list(dict.fromkeys(name for text in texts for name in text))
    return [name for name in names if len({text.get(name) for text in texts}) > 1] or names


def in_words(value: object) -> str:
    """Return a value in few characters: "0.1", "'adam'", "Size.BIG", "float32", ".../data/train.csv", "<Tensor>"."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if says_all_of_itself(value):
        return str(value)
    if isinstance(value, os.PathLike):
        text = os.fsdecode(value)
        return text if len(text) <= _LONGEST_VALUE else f"...{text[3 - _LONGEST_VALUE :]}"  # its end tells it apart
    if isinstance(value, str | bytes | tuple | list | dict | set | None):
        text = repr(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    return str(getattr(value, "__qualname__", None) or f"<{type(value).__qualname__}>")
