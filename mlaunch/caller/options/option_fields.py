"""The description of an option: its kind of value, its meaning and its flag, as a field of ``Options`` states them."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from mlaunch.base.frozen_record import frozen_record

T = TypeVar("T")
# The groups of flags in ``mlaunch run --help``.
SIZES, MEETING, OUTPUT, ENDING = "how many ranks, and where", "several machines", "output", "failure and end"


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
class Flag:
    """A flag of ``mlaunch run`` that sets an option.

    Attributes:
        names: Its own, and others for the same.
        metavar: For its value; "": it has none.
        meaning: For people.
        group: Of flags, in the help.
        torchruns: Torchrun has it, too: it has two spellings, and a variable.
        apart: The command reads it with others, in ``run/command/job.py``.
        kind: What argparse makes of its value; None: as usual for the option.
        of_python: Why it does not go with ``--no-python``; "": it does.
    """

    names: tuple[str, ...]
    metavar: str
    meaning: str
    group: str
    torchruns: bool = False
    apart: bool = False
    kind: type | None = None
    of_python: str = ""


@frozen_record
class About:
    """The facts about an option other than its name, type and default.

    Attributes:
        allowed: Checks its values, and names them.
        meaning: For people.
        flag: The flag of ``mlaunch run`` that sets it; None if there is none.
        variable: The environment variable that counts if the option is not given; "": there is none.
        needs: The option without which it has no effect, and why.
    """

    allowed: OptionType
    meaning: str
    flag: Flag | None = None
    variable: str = ""
    needs: tuple[str, str] | None = None


def option(
    default: T,
    allowed: OptionType,
    meaning: str,
    flag: Flag | None = None,
    *,
    variable: str = "",
    needs: tuple[str, str] | None = None,
    shown: bool = True,
) -> T:
    """Return a dataclass's field with all facts about the option. ``shown``: ``repr`` shows its value."""
    return field(default=default, repr=shown, metadata={"about": About(allowed, meaning, flag, variable, needs)})
