"""The caller's side of zygotes. Here is the first check for one, before each process's first call.

Most find none, and import no more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlaunch.base.exceptions import misuse
from mlaunch.warm.wire import zygote_place

if TYPE_CHECKING:
    from mlaunch.caller.fork_server import ForkServer, Interpreter

# Times as people write them: ``90s``, ``30m``, ``8h``, ``2d``.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 365 * _UNITS["d"]  # more is a typing error
_FORM = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def server(environ: Mapping[str, str], like: Interpreter) -> ForkServer | None:
    """Return a fork server that the user's zygote has forked for this process; None: there is no suitable one.

    ValueError: MLAUNCH_WARM is no time.
    """
    wish = wish_of(os.environ)
    if wish == 0:
        return None
    places = list(zygote_place.names(os.environ))
    if not places and wish is None:
        return None
    from mlaunch.warm.caller.zygotes import ask_zygote

    return ask_zygote(places, wish, environ, like)


def wish_of(environ: Mapping[str, str]) -> float | None:
    """Return the seconds of MLAUNCH_WARM; 0: use nothing warm; None: not set. ValueError for other texts."""
    text = environ.get(zygote_place.VARIABLE, "")
    if text in {"", "0"}:
        return 0.0 if text else None
    try:
        return duration(zygote_place.VARIABLE, text)
    except ValueError as error:
        raise misuse(error) from None


def duration(name: str, text: str) -> float:
    """Return the seconds. ValueError, which names the option or variable, and what is allowed."""
    found = _FORM.fullmatch(text.strip())
    # With a unit: "30" might be seconds or minutes.
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        given = f"{name} {text}" if name.startswith("-") else f"{name}={text}"
        raise ValueError(f"{given}: allowed: a time with its unit, such as 90s, 30m, 8h or 2d")
    return seconds
