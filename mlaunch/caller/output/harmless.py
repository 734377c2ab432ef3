"""A guard for code that shows output or status: an error there must not cost a call its values."""

from __future__ import annotations

import os
from types import TracebackType

from mlaunch.base.frames import is_ours
from mlaunch.base.log import log
from mlaunch.caller import interrupts

_told: set[str] = set()


class harmless:
    """A block whose errors are reported, once for each place, and not raised; except those of signal handlers.

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
    """Return the innermost line of this package, "display.py:12"."""
    place = ""
    while trace is not None:
        if is_ours(trace.tb_frame.f_code.co_filename) or not place:
            place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
