"""``stall=``: after how long without progress a run is reported, and whether it is ended then."""

from __future__ import annotations

import math

_STOP = "stop"


def parse(value: float | str | None) -> tuple[float | None, bool]:
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
            parse(value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: allowed: {self}") from None
