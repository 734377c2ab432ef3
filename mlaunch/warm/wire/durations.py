"""Lengths of time as people write them on a command line: ``90s``, ``30m``, ``8h``, ``2d``."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 365 * _UNITS["d"]  # beyond it somebody has mistyped
_FORM = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def duration(name: str, text: str) -> float:
    """Returns the seconds. ValueError that names the option, or the variable, and what is allowed."""
    found = _FORM.fullmatch(text.strip())
    # A unit is asked for: "30" of a lease might be seconds or hours.
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        given = f"{name} {text}" if name.startswith("-") else f"{name}={text}"
        raise ValueError(f"{given}: allowed: a time with its unit, such as 90s, 30m, 8h or 2d")
    return seconds
