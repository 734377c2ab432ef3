"""The kinds of values that options have: each checks a value, and says in words what is allowed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mlaunch.base import seeding
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import signals_of

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.protocol.calls import Call

HIGHEST_PORT = 65535


class TakesCalls(Protocol):
    """The type of values for ``ranks=``: ``mlaunch.Ranks``."""

    def call(self, options: Any, call: Call) -> Ended:
        """Make a call, with ``Options``, and wait for it."""


class PlacesRanks(Protocol):
    """The type of values for ``engine=``: an engine, or machines that an engine holds."""

    def call(self, options: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
        """Make a call on ranks of its own, with ``Options``, and wait for it."""

    def open_session(self, options: Any, rules: Any) -> Any:
        """Start ranks that stay, a ``RanksLaunch``; do not wait for them."""


class OptionType:
    """A kind of value; ``str()`` says what is allowed.

    Attributes:
        word: What argparse makes of the word behind a flag.
    """

    word: ClassVar[type] = str

    def check(self, name: str, value: object) -> None:
        """Raise TypeError or ValueError that names the option, the value and what is allowed."""
        raise NotImplementedError

    def of_word(self, word: Any) -> object:
        """Return the value for the word behind a flag. ValueError if there is none."""
        return word

    @property
    def of_flag(self) -> str:
        """Return what is allowed behind a flag."""
        return re.sub(r"[,;] or None.*", "", str(self))

    def read(self, flag: str, word: object) -> object:
        """Return the value of a flag. ValueError that names the flag, the word and what is allowed."""
        try:
            value = self.of_word(word)
            self.check(flag, value)
        except (TypeError, ValueError):
            raise ValueError(f"{f'{flag} {word}'.rstrip()}: allowed: {self.of_flag}") from None
        return value


@frozen_record
class Whole(OptionType):
    """A whole number in a range."""

    word: ClassVar[type] = int
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
class Seconds(OptionType):
    """A finite number of seconds. ``optional``: None is allowed. ``delta``: a timedelta is allowed."""

    word: ClassVar[type] = float
    zero: bool = False  # allowed
    optional: bool = False
    delta: bool = False
    none: str = " for no limit"  # what None means

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
class Name(OptionType):
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


class Secret(OptionType):
    """A string that no message shows, or None."""

    def __str__(self) -> str:
        return "a string that is not empty (its value is not shown), or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and (not isinstance(value, str) or not value):
            raise TypeError(f"{name}: allowed: {self}")


class Choice(OptionType):
    """One of some words."""

    def __init__(self, *words: str | None) -> None:
        self.words = words

    def __str__(self) -> str:
        return ", ".join(map(repr, self.words))

    @property
    def of_flag(self) -> str:
        return ", ".join(filter(None, self.words))

    def check(self, name: str, value: object) -> None:
        if value not in self.words and not self._allows(value):
            raise ValueError(f"{name}={value!r}: allowed: {self}")

    def _allows(self, _value: object) -> bool:
        """True if a value that is not one of the words is allowed."""
        return False


class WordOrCpus(Choice):
    """One of some words, or lists of CPUs, one for each local rank."""

    def __str__(self) -> str:
        return f'{super().__str__()}, or CPUs of each local rank such as "0-7;8-15"'

    @property
    def of_flag(self) -> str:
        return f"{super().of_flag}, or CPUs of each local rank such as '0-7;8-15'"

    def _allows(self, value: object) -> bool:
        from mlaunch.base import own_process  # only needed here

        try:
            return isinstance(value, str) and all([own_process.cpus_of_list(part) for part in value.split(";")])
        except ValueError:
            return False


class Switch(OptionType):
    """True or False."""

    def __str__(self) -> str:
        return "True, False"

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")


class Leasing(OptionType):
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


class Signals(OptionType):
    """Names of signals with commas between them, or None."""

    def __str__(self) -> str:
        return "names of signals with commas between them, or None"

    def check(self, name: str, value: object) -> None:
        if value is None:
            return
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        signals_of(f"{name}={value!r}", value)

    def read(self, flag: str, word: object) -> object:
        signals_of(f"{flag} {word}", str(word))
        return word


def _numbers(name: str, value: object, allowed: str) -> Sequence[int]:
    """Return a value that is a sequence of whole numbers from 0. TypeError or ValueError for other values."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={value!r}: allowed: {allowed}")
    for number in value:
        Whole(0).check(name, number)
    return value


class Devices(OptionType):
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


class Variables(OptionType):
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


class FilePath(OptionType):
    """The path of a file, or None."""

    def __str__(self) -> str:
        return "the path of a file, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if value is not None and not os.fspath(value):
            raise ValueError(f"{name}='': allowed: {self}")


class Listener(OptionType):
    """A listener to events."""

    def __str__(self) -> str:
        return "a function, the path of a file, 'otel', or None"

    @property
    def of_flag(self) -> str:
        return "the path of a file, or otel"

    def check(self, name: str, value: object) -> None:
        if not (value is None or callable(value) or isinstance(value, str | os.PathLike)):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if value == "":
            raise ValueError(f"{name}='': allowed: {self}")


class FromTo(OptionType):
    """Two numbers of steps."""

    of_flag = "two numbers of steps, from 0: the first one and the one after the last, 5,8"

    def __str__(self) -> str:
        return "two numbers of steps, from 0: the first one and the one after the last, (5, 8)"

    def of_word(self, word: str) -> tuple[int, ...]:
        return tuple(map(int, word.split(",")))

    def check(self, name: str, value: object) -> None:
        value = _numbers(name, value, str(self))
        if len(value) != 2 or not value[0] < value[1]:
            raise ValueError(f"{name}={value!r}: allowed: {self}")


class SomeRanks(OptionType):
    """Ranks, each once, or None for all."""

    of_flag = "ranks, each once, with commas between them"

    def __str__(self) -> str:
        return "a list of ranks, or None for all"

    def of_word(self, word: str) -> tuple[int, ...]:
        return tuple(map(int, word.split(",")))

    def check(self, name: str, value: object) -> None:
        if value is None:
            return
        value = _numbers(name, value, str(self))
        if not value or len(set(value)) != len(value):
            raise ValueError(f"{name}={list(value)}: allowed: at least one rank, each once")


class Staying(OptionType):
    """Ranks that stay."""

    def __str__(self) -> str:
        return "Ranks, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and not (callable(getattr(value, "submit", None)) and hasattr(value, "run")):
            raise TypeError(f"{name}={value!r}: allowed: {self}")


class AnEngine(OptionType):
    """An engine: it places ranks on other machines."""

    def __str__(self) -> str:
        return "an engine such as mlaunch.engines.Slurm(), what its hold() has returned, or None"

    def check(self, name: str, value: object) -> None:
        if value is not None and (isinstance(value, type) or not callable(getattr(value, "call", None))):
            raise TypeError(f"{name}={value!r}: allowed: {self}")


class Seed(OptionType):
    """A seed for the generators, or None."""

    def __str__(self) -> str:
        return seeding.ALLOWED

    def check(self, _name: str, value: object) -> None:
        seeding.check(value)


class Directory(OptionType):
    """A path, or None. ``Options`` checks it, because that depends on ``output``, which says where the streams go."""

    def __str__(self) -> str:
        return "a path, or None"

    def check(self, name: str, value: object) -> None:
        """Check nothing."""


# For runs that hang or fail

_IDE = re.compile(r"debugpy(?::(?P<ranks>\d+(?:,\d+)*))?")
_STOP = "stop"


def parse_stall(value: float | str | None) -> tuple[float | None, bool]:
    """Return the seconds, None for never, and whether the run ends. ValueError for other values."""
    if value is None:
        return None, False
    seconds, _, then = str(value).strip().partition(" ")
    try:
        number = float(seconds)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf or then.strip() not in {"", _STOP} or isinstance(value, bool):
        raise ValueError
    return number, then.strip() == _STOP


class StallLimit(OptionType):
    """A number of seconds, also with the word for what happens then."""

    def __str__(self) -> str:
        return 'seconds, more than 0, also as "60 stop", which ends the run; or None for never'

    of_flag = "seconds, more than 0, also as '60 stop', or none"

    def of_word(self, word: str) -> float | str | None:
        seconds, ends = (None, False) if word == "none" else parse_stall(word)
        return word if ends else seconds

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int | float | str | None) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        try:
            parse_stall(value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: allowed: {self}") from None


def parse_share(value: float | str) -> float:
    """Return the share, for "10%" 0.1. ValueError for a value that is not between 0 and 1."""
    text = str(value).strip()
    share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 < share < 1:
        raise ValueError
    return share


class ShareOfTime(OptionType):
    """A share of the time, or None."""

    def __str__(self) -> str:
        return 'a share of the time, more than 0% and less than 100%, such as "10%" or 0.1; or None'

    of_flag = "a share such as 10%, more than 0% and less than 100%"

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int | float | str | None) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        try:
            if value is not None:
                parse_share(value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: allowed: {self}") from None


def ranks_of(debug: bool | str) -> list[int]:
    """Return the ranks that ``debug=`` names: [0, 2] for "debugpy:0,2", and an empty list for all ranks."""
    found = _IDE.fullmatch(debug) if isinstance(debug, str) else None
    return [int(rank) for rank in (found["ranks"] or "").split(",") if rank] if found else []


class DebugWay(OptionType):
    """True, False, or the name of an IDE's debugger."""

    def __str__(self) -> str:
        return 'True, False, "debugpy", or with ranks "debugpy:0,2"'

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool | str):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if isinstance(value, str) and not _IDE.fullmatch(value):
            raise ValueError(f"{name}={value!r}: allowed: {self}")
