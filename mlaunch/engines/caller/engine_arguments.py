"""What engines are made of, checked as the options of ``launcher`` are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from mlaunch.caller.options.option_values import Name

OPTIONAL_NAME = Name(optional=True)


class Words:
    """A program and its options, or names: strings, each by itself. ``example``: of what is allowed."""

    def __init__(self, *example: str, or_text: bool = False) -> None:
        self._example = list(example)
        self._or_text = or_text  # in which the shell's rules part them

    def __str__(self) -> str:
        text = f"{shlex.join(self._example)!r}, or " if self._or_text else ""
        return f"{text}a list of strings, {self._example}"

    def check(self, name: str, value: object) -> None:
        """Raises TypeError or ValueError that names the option, the value and what is allowed."""
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for word in value:
            if not isinstance(word, str):
                raise TypeError(f"{name}={value!r}: allowed: {self}; {word!r} is none")
        if not value or not value[0]:
            raise ValueError(f"{name}={value!r}: allowed: {self}")


class Amounts:
    """So much of each of several things."""

    def __str__(self) -> str:
        return "a mapping of names to numbers from 0, {'CPU': 8, 'GPU': 4}, or None"

    def check(self, name: str, value: object) -> None:
        """Raises TypeError or ValueError that names the option, the value and what is allowed."""
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for what, amount in (value or {}).items():
            if not isinstance(what, str) or not isinstance(amount, int | float) or isinstance(amount, bool):
                raise TypeError(f"{name}={value!r}: allowed: {self}")
            if not math.isfinite(amount) or amount < 0:
                raise ValueError(f"{name}={value!r}: allowed: {self}")
