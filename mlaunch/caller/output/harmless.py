"""The guard around all that shows: an error there costs what is shown, and no call its values."""

from __future__ import annotations

import os
from types import TracebackType

from mlaunch.base.frames import is_ours
from mlaunch.base.log import log
from mlaunch.caller import interrupts

_told: set[str] = set()


class harmless:
    """Ends a block that raises, and reports what it raised, once for each place; not what a signal handler raised.

    Not a contextlib context manager; see ``interrupts``.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or interrupts.by_handler(error):
            return False
        place = _place(trace)
        if place not in _told:
            _told.add(place)
            log.warning(
                "could not show what ranks do or print, and left it out: %s: %s (%s). The call goes on and loses no "
                "value. Please report this; the traceback is logged at level DEBUG",
                type(error).__name__, error, place,
            )  # fmt: skip
        log.debug("could not show what ranks do or print", exc_info=error)
        return True


def _place(trace: TracebackType | None) -> str:
    """Returns the innermost line of this package, as "display.py:12"."""
    place = ""
    while trace is not None:
        if is_ours(trace.tb_frame.f_code.co_filename) or not place:
            place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
