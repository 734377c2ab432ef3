"""``profile=``, ``profile_steps=`` and ``profile_ranks=``: which steps of which ranks a file has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.caller.options.option_values import Whole, option

_ELSEWHERE = {
    "ranks": "these ranks were started without it",
    "keep": "these ranks stay",
}


class TraceFile:
    """The path of a file."""

    def __str__(self) -> str:
        return "the path of a file, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if value is not None and not os.fspath(value):
            raise ValueError(f"{name}='': allowed: {self}")


class FromTo:
    """Two numbers of steps. ``of_flag``: what a flag of them may be."""

    of_flag = "two numbers of steps, from 0: the first one and the one after the last, 5,8"

    def __str__(self) -> str:
        return "two numbers of steps, from 0: the first one and the one after the last, (5, 8)"

    def check(self, name: str, value: object) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for number in value:
            Whole(0).check(name, number)
        if len(value) != 2 or not value[0] < value[1]:
            raise ValueError(f"{name}={value!r}: allowed: {self}")


class SomeRanks:
    """Ranks, each once, or None for all. ``of_flag``: what a flag of them may be."""

    of_flag = "ranks, each once, with commas between them"

    def __str__(self) -> str:
        return "a list of ranks, or None for all"

    def check(self, name: str, value: object) -> None:
        if value is None:
            return
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for number in value:
            Whole(0).check(name, number)
        if not value or len(set(value)) != len(value):
            raise ValueError(f"{name}={list(value)}: allowed: at least one rank, each once")


def check_profile(given: Mapping[str, Any]) -> None:
    """Raises ValueError for options that do not go with a profile."""
    if given["profile"] is None:
        return
    for name, why in _ELSEWHERE.items():
        if given[name] is not None:
            raise ValueError(f"profile={given['profile']!r} with {name}=: {why}; allowed: a call with ranks of its "
                             f"own")  # fmt: skip


PROFILE: str | os.PathLike[str] | None = option(
    None,
    TraceFile(),
    "A file that gets a trace of torch.profiler, with a track for each rank and the launch's own timeline, for "
    'https://ui.perfetto.dev; a name with ".gz" at its end is compressed. Replaced if it exists.',
)
STEPS: Sequence[int] = option(
    (5, 8),
    FromTo(),
    "The steps to trace: from the first of these numbers on, until before the second. ``mlaunch.progress`` or "
    "``mlaunch.step()`` counts them, from 0.",
)
RANKS: Sequence[int] | None = option(None, SomeRanks(), "The ranks to trace. None: all.")
