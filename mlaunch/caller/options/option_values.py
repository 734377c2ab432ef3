"""What an option is made of. Its kind of value checks a value, and says in words what is allowed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from typing import Protocol, TypeVar

from mlaunch.base import seeding, signals
from mlaunch.base.frozen_record import frozen_record

T = TypeVar("T")


class OptionType(Protocol):
    """A kind of value; ``str()`` says what is allowed."""

    def check(self, name: str, value: object) -> None:
        """Raises TypeError or ValueError that names the option, the value and what is allowed."""


@frozen_record
class About:
    """What is to be known of an option besides its name, type and default.

    Attributes:
        allowed: Checks its values, and names them.
        meaning: For people.
        flag: That of ``mlaunch run`` which sets it; empty where none does.
        variable: The environment variable that counts where the option is not given; empty without one.
    """

    allowed: OptionType
    meaning: str
    flag: str = ""
    variable: str = ""


def option(
    default: T, allowed: OptionType, meaning: str, *, flag: str = "", variable: str = "", shown: bool = True
) -> T:
    """Returns a dataclass's field with all that there is to say of it. ``shown``: ``repr`` shows its value."""
    return field(default=default, repr=shown, metadata={"about": About(allowed, meaning, flag, variable)})


@frozen_record
class Whole:
    """A whole number in a range."""

    lowest: int
    highest: int | None = None
    optional: bool = False

    def __str__(self) -> str:
        highest = "" if self.highest is None else f" to {self.highest}"
        return f"whole numbers from {self.lowest}{highest}" + (", or None" if self.optional else "")

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if value < self.lowest or (self.highest is not None and value > self.highest):
            raise ValueError(f"{name}={value!r}: allowed: {self}")


@frozen_record
class Seconds:
    """A finite number of seconds. ``optional``: or None. ``delta``: a timedelta will do."""

    zero: bool = False  # allowed
    optional: bool = False
    delta: bool = False
    none: str = " for no limit"  # what it means

    def __str__(self) -> str:
        return ("seconds, 0 or more" if self.zero else "seconds, more than 0") + (
            f", or None{self.none}" if self.optional else ""
        )

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        seconds = value.total_seconds() if self.delta and isinstance(value, timedelta) else value
        if not isinstance(seconds, int | float) or isinstance(seconds, bool):
            raise TypeError(f"{name}={value!r}: allowed: a number of seconds")
        if not math.isfinite(seconds):
            raise ValueError(f"{name}={value!r}: allowed: a finite number of seconds")
        if seconds < 0 or (seconds == 0 and not self.zero):
            raise ValueError(f"{name}={value!r}: allowed: {self}")


@frozen_record
class Name:
    """A string that is not empty."""

    optional: bool = False

    def __str__(self) -> str:
        return "a name, or None" if self.optional else "a name"

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: allowed: a string")
        if not value:
            raise ValueError(f"{name}='': allowed: a name")


class Secret:
    """A string that no message shows, or None."""

    def __str__(self) -> str:
        return "a string that is not empty (its value is not shown), or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and (not isinstance(value, str) or not value):
            raise TypeError(f"{name}: allowed: {self}")


class Choice:
    """One of some words."""

    def __init__(self, *words: str | None) -> None:
        self.words = words

    def __str__(self) -> str:
        return ", ".join(map(repr, self.words))

    def check(self, name: str, value: object) -> None:
        if value not in self.words and not self._allows(value):
            raise ValueError(f"{name}={value!r}: allowed: {self}")

    def _allows(self, _value: object) -> bool:
        """True if it is allowed, though no word."""
        return False


class WordOrCpus(Choice):
    """One of some words, or lists of CPUs, for each local rank one."""

    def __str__(self) -> str:
        return f'{super().__str__()}, or CPUs of each local rank such as "0-7;8-15"'

    def _allows(self, value: object) -> bool:
        from mlaunch.base import cores  # for this alone

        try:
            return isinstance(value, str) and all([cores.of_list(part) for part in value.split(";")])
        except ValueError:
            return False


class Switch:
    """True or False."""

    def __str__(self) -> str:
        return "True, False"

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")


class Leasing:
    """True, False, or a word for a certain kind of True."""

    def __str__(self) -> str:
        return "True, False, 'idle'"

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool | str):
            count = (
                f"; for {value} devices: n_gpus={value}, {name}=True" if isinstance(value, int) and value > 0 else ""
            )
            raise TypeError(f"{name}={value!r}: allowed: {self}{count}")
        if isinstance(value, str) and value != "idle":
            raise ValueError(f"{name}={value!r}: allowed: {self}")


class Signals:
    """Names of signals with commas between them, or None."""

    def __str__(self) -> str:
        return "names of signals with commas between them, or None"

    def check(self, name: str, value: object) -> None:
        if value is None:
            return
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        signals.numbers_of(f"{name}={value!r}", value)


def _numbers(name: str, value: object, allowed: str) -> Sequence[int]:
    """Return a value that is a sequence of whole numbers from 0. TypeError and ValueError for what is not."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={value!r}: allowed: {allowed}")
    for number in value:
        Whole(0).check(name, number)
    return value


class Devices:
    """Numbers of devices, each once, or None."""

    def __str__(self) -> str:
        return "a list of device numbers, or None"

    def check(self, name: str, value: object) -> None:
        if value is None:
            return
        how_many = f"; for {value} ranks: n_gpus={value}" if isinstance(value, int) and value > 0 else ""
        value = _numbers(name, value, f"a list of device numbers{how_many}")
        if not value or len(set(value)) != len(value):
            raise ValueError(f"{name}={list(value)}: allowed: at least one device, each once")


class Variables:
    """Environment variables, or None."""

    def __str__(self) -> str:
        return "a mapping of strings to strings, or None"

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for variable, text in (value or {}).items():
            if not isinstance(variable, str) or not isinstance(text, str):
                raise TypeError(f"{name}={{{variable!r}: {text!r}}}: allowed: names and values that are strings")
            if not variable or "=" in variable or not _can_be_set(variable) or not _can_be_set(text):
                raise ValueError(
                    f"{name}={{{variable!r}: ...}}: allowed: names that are not empty and without '=', and names and "
                    f"values that the system can take: no NUL, no half of a surrogate pair"
                )


def _can_be_set(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


class FilePath:
    """The path of a file, or None."""

    def __str__(self) -> str:
        return "the path of a file, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if value is not None and not os.fspath(value):
            raise ValueError(f"{name}='': allowed: {self}")


class Listener:
    """What gets events."""

    def __str__(self) -> str:
        return "a function, the path of a file, 'otel', or None"

    def check(self, name: str, value: object) -> None:
        if not (value is None or callable(value) or isinstance(value, str | os.PathLike)):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if value == "":
            raise ValueError(f"{name}='': allowed: {self}")


class FromTo:
    """Two numbers of steps. ``of_flag``: what a flag of them may be."""

    of_flag = "two numbers of steps, from 0: the first one and the one after the last, 5,8"

    def __str__(self) -> str:
        return "two numbers of steps, from 0: the first one and the one after the last, (5, 8)"

    def check(self, name: str, value: object) -> None:
        value = _numbers(name, value, str(self))
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
        value = _numbers(name, value, str(self))
        if not value or len(set(value)) != len(value):
            raise ValueError(f"{name}={list(value)}: allowed: at least one rank, each once")


class Staying:
    """Ranks that stay."""

    def __str__(self) -> str:
        return "Ranks, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and not (callable(getattr(value, "submit", None)) and hasattr(value, "run")):
            raise TypeError(f"{name}={value!r}: allowed: {self}")


class AnEngine:
    """An engine: it places ranks on other machines."""

    def __str__(self) -> str:
        return "an engine such as mlaunch.engines.Slurm(), what its hold() has returned, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and (isinstance(value, type) or not callable(getattr(value, "call", None))):
            raise TypeError(f"{name}={value!r}: allowed: {self}")


class Seed:
    """What the generators may start from, or None."""

    def __str__(self) -> str:
        return seeding.ALLOWED

    def check(self, _name: str, value: object) -> None:
        seeding.check(value)


class Directory:
    """A path, or None. ``Options`` checks it, because of ``output``, which says whose the streams are."""

    def __str__(self) -> str:
        return "a path, or None"

    def check(self, name: str, value: object) -> None:
        """Checks nothing."""
