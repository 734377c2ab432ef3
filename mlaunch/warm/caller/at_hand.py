"""Whether there may be a zygote for this process, or one is to be left: most calls find none, and import no more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlaunch.base.misuse import misuse
from mlaunch.warm.wire import zygote_place

if TYPE_CHECKING:
    from mlaunch.caller.server.fork_server import ForkServer
    from mlaunch.caller.server.start_server import Interpreter


def server(environ: Mapping[str, str], like: Interpreter) -> ForkServer | None:
    """Return a fork server that the user's zygote has forked for this process; None: none is there that will do.

    ValueError: MLAUNCH_WARM is no time.
    """
    wish = wish_of(os.environ)
    if wish == 0:
        return None
    places = list(zygote_place.names(os.environ))
    if not places and wish is None:
        return None
    from mlaunch.warm.caller.zygote_client import ask_zygote

    return ask_zygote(places, wish, environ, like)


def wish_of(environ: Mapping[str, str]) -> float | None:
    """Return the seconds of MLAUNCH_WARM; 0: nothing warm is to be used, None: nothing is said. ValueError."""
    text = environ.get(zygote_place.VARIABLE, "")
    if text in {"", "0"}:
        return 0.0 if text else None
    from mlaunch.warm.wire.durations import duration

    try:
        return duration(zygote_place.VARIABLE, text)
    except ValueError as error:
        raise misuse(error) from None
