"""Values of flags: checked, or refused with what is allowed."""

from __future__ import annotations

import math

PRINT_COMPLETION = "--print-completion"
# Commands of features: each exists if its feature does.
OF_FEATURES = {"debug": "debug", "run": "run", "stacks": "insight", "why": "insight", "warm": "warm"}


class UsageError(ValueError):
    """A wrong command line; the text is for its author."""


def numbers(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"{name} {text}: allowed: numbers with commas between them")
    return tuple(map(int, parts))


def at_least(lowest: int, name: str, value: int) -> int:
    if value < lowest:
        raise UsageError(f"{name} {value}: allowed: {lowest} or more")
    return value


def seconds_of(name: str, value: float | str) -> float:
    seconds = number(value)
    if not seconds > 0:
        raise UsageError(f"{name} {value}: allowed: seconds, more than 0")
    return seconds


def number(value: float | str) -> float:
    """Return the number; NaN, which is in no range, for other texts and infinities."""
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
