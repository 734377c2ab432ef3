"""Options for runs that hang or fail: ``stall=``, after how long without progress a run is reported; ``slow=``, for how
much of their time the others wait for a rank until that is; ``debug=``, a prompt where the call is made, or ranks that
wait for an IDE; ``inline=``, no ranks.
"""

from __future__ import annotations

import math
import re

from mlaunch.caller.options.option_values import Switch, option

_IDE = re.compile(r"debugpy(?::(?P<ranks>\d+(?:,\d+)*))?")
_STOP = "stop"


def parse_stall(value: float | str | None) -> tuple[float | None, bool]:
    """Returns the seconds, None for never, and whether the run ends. ValueError for what is neither."""
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


class StallLimit:
    """Seconds, also with what is to happen then."""

    def __str__(self) -> str:
        return 'seconds, more than 0, also as "60 stop", which ends the run; or None for never'

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int | float | str | None) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        try:
            parse_stall(value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: allowed: {self}") from None


def parse_share(value: float | str) -> float:
    """Return the share, of "10%" 0.1. ValueError for what is none between 0 and 1."""
    text = str(value).strip()
    share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 < share < 1:
        raise ValueError
    return share


class ShareOfTime:
    """A share of the time, or None."""

    def __str__(self) -> str:
        return 'a share of the time, more than 0% and less than 100%, such as "10%" or 0.1; or None'

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int | float | str | None) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        try:
            if value is not None:
                parse_share(value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: allowed: {self}") from None


def ranks_of(debug: bool | str) -> list[int]:
    """Returns the ranks that ``debug=`` names: [0, 2] for "debugpy:0,2", and none for all."""
    found = _IDE.fullmatch(debug) if isinstance(debug, str) else None
    return [int(rank) for rank in (found["ranks"] or "").split(",") if rank] if found else []


class DebugWay:
    """True, False, or what names an IDE's debugger."""

    def __str__(self) -> str:
        return 'True, False, "debugpy", or with ranks "debugpy:0,2"'

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool | str):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        if isinstance(value, str) and not _IDE.fullmatch(value):
            raise ValueError(f"{name}={value!r}: allowed: {self}")


SLOW: float | str | None = option(
    None,
    ShareOfTime(),
    'A share of the time, such as "10%". If the others wait for the same rank for longer, of 30 s, a report says once '
    "which rank it is, and the run continues; ``mlaunch why`` and ``mlaunch ps`` say it at any time. None: ranks are "
    "not compared.",
    flag="--slow",
)
DEBUG = option(
    False,
    DebugWay(),
    "A rank that fails, or calls ``breakpoint()``, opens pdb in this terminal or cell. With "
    '"debugpy:0,2" these ranks wait for an IDE. No ``timeout`` or ``stall`` counts; ``deadline`` waits.',
)
INLINE = option(
    False,
    Switch(),
    "No processes: the function runs in this one, as rank 0 of a world of one, whatever ``n_gpus`` says.",
)
