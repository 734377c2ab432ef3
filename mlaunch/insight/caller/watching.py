"""``mlaunch ps --watch`` and ``train.watch()``: a table of what ranks do that is drawn anew each second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlaunch.caller.call_log import CallLog
from mlaunch.caller.output.console import Console
from mlaunch.caller.output.live import LiveLines
from mlaunch.caller.report import notebook
from mlaunch.caller.running_launches import ask, launches_of
from mlaunch.core import load
from mlaunch.insight.caller.device_use import DeviceUse
from mlaunch.insight.caller.watch_rows import RankTable
from mlaunch.insight.wire import WATCH

if TYPE_CHECKING:
    from mlaunch.display.caller.drawn_lines import Area, DrawnLines

EVERY = 1.0  # seconds
_REDRAWN = 0.1  # seconds


def watch_all(every: float, nothing: Callable[[], str]) -> None:
    """Shows this user's running launches on the terminal, until it is interrupted. ``nothing``: says that none runs.

    Raises:
        OSError: stdout is no terminal, or a program that may draw there reads stderr.
        ImportError: Without rich (extra: watch).
    """
    if not sys.stdout.isatty():
        raise OSError("ps --watch needs a terminal, and stdout is none; a program takes mlaunch ps --json")
    drawing = load.room("display", "caller", "mlaunch ps --watch")
    if drawing.is_piped(2):
        raise OSError("ps --watch draws on the whole terminal, and so may the program that reads its stderr: send that "
                      "to a file (2>errors.txt)")  # fmt: skip
    place, table = _terminal(drawing, "mlaunch ps --watch"), _table()
    try:
        while True:
            launches = sorted(ask(WATCH), key=lambda launch: float(launch["age"]))
            _write(place.show("\n".join(table.lines(launches) or [nothing()])))
            time.sleep(every)
    finally:
        _write(place.close([]))


def watch_calls(name: str, log: CallLog) -> None:
    """Shows what each rank of the function's calls does, in other threads or submitted, until none of them runs.

    In a notebook it is a display of the running cell, on a terminal lines below what is printed, in the place of the
    calls' own. Interrupted, it ends, and the calls go on.

    Raises:
        RuntimeError: There is neither.
        ImportError: On a terminal, without rich (extra: watch).
    """
    display, table = _place_for(f"{name}.watch()").lines(time.monotonic()), _table()
    lines: list[str] = []
    try:
        while launches := _launches(name, log):
            lines = table.lines([launch for launch in launches if launch]) or [f"{name}() has no ranks yet"]
            _show_for_a_while(display, lines, log)
        if not lines:
            _tell(f"mlaunch: no call of {name}() runs in this process\n")
    finally:
        state = "runs" if log.running else "has ended"
        with LiveLines.lock:
            above = [] if notebook.is_here() else [""]  # a terminal leaves the first line out
            _tell(display.close([*above, *lines, f"{name}() {state}"]) if lines else "")


def _launches(name: str, log: CallLog) -> list[dict[str, Any]]:
    """Returns what launches tell that run calls of the function, {} for one that has none yet; [] if all is over."""
    found = [launch for launch_id in launches_of(name) for launch in ask(WATCH, launch_id)]
    return found or [{}] * log.running


def _show_for_a_while(display: DrawnLines, lines: list[str], log: CallLog) -> None:
    """Draws them several times, since what is printed takes their place."""
    until = time.monotonic() + EVERY
    while (now := time.monotonic()) < until:
        with LiveLines.lock:
            _tell(display.take_over() + display.draw(lines, now))
        if not log.running:  # a sweep's launches are counted there
            time.sleep(_REDRAWN)
        elif log.wait_over(_REDRAWN):
            return


def _table() -> RankTable:
    return RankTable(DeviceUse().of, os.uname().nodename)


def _place_for(who: str) -> Area:
    drawing = load.room("display", "caller", who)
    if notebook.is_here():
        found: Area = drawing.Notebook()
        return found
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        raise RuntimeError(f"{who} needs a notebook, or a terminal as stderr; {who.removesuffix('watch()')}why() and "
                           f"mlaunch ps tell in text")  # fmt: skip
    if drawing.is_piped(1):
        raise RuntimeError(f"{who} draws on the terminal, and so may the program that reads stdout (| less): send that "
                           f"to a file, or ask {who.removesuffix('watch()')}why()")  # fmt: skip
    return _terminal(drawing, who)


def _terminal(drawing: Any, who: str) -> Area:
    try:
        found: Area = drawing.Terminal()
    except ImportError as error:
        raise ImportError(f"{who} draws on a terminal with rich, which is not installed: "
                          f"pip install 'mlaunch[watch]'") from error  # fmt: skip
    return found


def _tell(text: str) -> None:
    """Writes where the calls write."""
    console = Console()
    console.write(2, text.encode())
    console.close()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
