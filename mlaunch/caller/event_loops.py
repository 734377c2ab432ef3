"""Whether a thread that waits would stop an event loop of asyncio."""

from __future__ import annotations

import sys

_HANDLE, _CELL = ("asyncio.events", "_run"), ("IPython.core.interactiveshell", "run_code")


def stops_an_event_loop() -> bool:
    """True if this thread runs one that a wait would stop; False in a notebook's cell, which stops its kernel's anyway.

    A cell is run by a step of the kernel's loop, and whatever it calls, in that step; what asyncio calls itself (the
    coroutine of a task, the end of a timeout) has no cell between itself and the loop.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place in {_HANDLE, _CELL}:
            return place == _HANDLE
        frame = frame.f_back  # type: ignore[assignment]
    return True  # a loop of another make
