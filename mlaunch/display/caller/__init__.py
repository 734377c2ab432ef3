"""Output in the calling process beyond plain lines: what ranks display in a notebook, and how far a launch is.

The latter is a launch's status, and one bar for all ranks of this machine.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

from mlaunch.base.text import on_a_clock
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.output.console import LiveLines
from mlaunch.caller.report import notebook
from mlaunch.caller.report.launch_report import History
from mlaunch.display import wire
from mlaunch.display.caller.areas import Notebook as Notebook
from mlaunch.display.caller.areas import Terminal as Terminal
from mlaunch.display.caller.areas import area as area
from mlaunch.display.caller.areas import is_piped as is_piped
from mlaunch.display.wire import STREAM as STREAM
from mlaunch.display.wire import LineCutter as LineCutter
from mlaunch.display.wire import line_of as line_of
from mlaunch.protocol import late_imports
from mlaunch.protocol.board import Board, Loop
from mlaunch.protocol.messages import Phase

SECTIONS = {"display": True}  # with these, ranks make their part
_RUNNING = {Phase.RUNNING, Phase.COMMANDED, Phase.ANSWERING, Phase.RETURNED, Phase.LEAVING}
_RUNNING |= {Phase.IDLE}  # a rank that stays has come back, or is about to begin
_WIDEST = 100  # characters of a bar


def show(line: bytes) -> str:
    """Show a display of a rank in the running cell; return the text to print in its place, as ``publish`` does."""
    instead = publish(line)
    if clears(line) and LiveLines.holder is not None:
        LiveLines.holder.forget()
    return instead


def clears(line: bytes) -> bool:
    """True if the rank clears the cell's output."""
    found = wire.read(line)
    return found is not None and "clear" in found[1]


def publish(line: bytes, publisher: Any = None) -> str:
    """Show a display of a rank; return the text to print in its place, if the notebook does not take it.

    ``publisher``: None for the running cell's.
    """
    found = wire.read(line)
    if found is None:  # the rank was interrupted as it wrote
        return ""
    content: dict[str, Any] = found[1]
    try:
        publisher = notebook.shell().display_pub if publisher is None else publisher
        if "clear" in content:
            publisher.clear_output(wait=bool(content["clear"]))
        else:
            publisher.publish(**content)
    except Exception:  # a frontend's publisher may raise anything
        data = content.get("data")
        return f"{data.get('text/plain', '')}\n" if isinstance(data, dict) else ""
    return ""


def status_lines(outcome: Outcome, history: History, waiting: str, *, over: bool = False) -> list[str]:
    """Return the lines of a launch: its status and its loop. ``waiting``: the other machines that it waits for.

    ``over``: the call is over, although the ranks stay.
    """
    spec = outcome.spec
    size, gone = spec.local_world_size, len(history.gone)
    phase = _end(outcome) if over or gone == size else _phase(outcome, history, waiting)
    line = f"{spec.call.name}  {on_a_clock(time.monotonic() - history.begun)}  {phase}"
    done = f", {gone} of {size} ranks done" if 0 < gone < size else ""
    return [line + done, *_loops(history.board, spec.rank_start, size, history.begun)]


def _end(outcome: Outcome) -> str:
    return "failed" if outcome.failures else "stopped" if outcome.stopped else "done"


def _phase(outcome: Outcome, history: History, waiting: str) -> str:
    size = outcome.spec.local_world_size
    if history.board is None:
        return f"joining, {waiting}" if waiting else "starting"
    if outcome.failures or outcome.stopped:
        return "stopping"
    phase = "running" if {history.board[local_rank] for local_rank in range(size)} <= _RUNNING else "starting"
    module = next(filter(None, (history.board.importing(local_rank) for local_rank in range(size))), "")
    if not module:
        return phase
    return f"{phase}, importing {module}{', which later calls find imported' if module in late_imports.NAMES else ''}"


def _loops(board: Board | None, rank_start: int, size: int, since: float = 0.0) -> list[str]:
    """Return the bar of the latest loop that began after ``since``; none before the first."""
    if board is None:
        return []
    found = [board.loop(local_rank) for local_rank in range(size)]
    found = [loop if loop.start >= since else replace(loop, number=0, done=0) for loop in found]
    latest = max(loop.number for loop in found)
    return [loop_line(found, latest, rank_start)] if latest else []


def loop_line(found: list[Loop], number: int, rank_start: int) -> str:
    """Return the bar of one loop, at the pace of the slowest rank. Some ranks may not have begun or be done."""
    there = [loop for loop in found if loop.number == number]
    total = max(loop.total for loop in there)
    done = [loop.done if loop.number == number else 0 for loop in found]
    slowest = min(range(len(done)), key=done.__getitem__)
    spread = max(done) - done[slowest]
    behind = f"rank {rank_start + slowest} is {spread} behind" if spread else ""
    through = all(loop.done == loop.total for loop in found)
    now = max(loop.at for loop in there) if through else time.monotonic()
    start = min(loop.start for loop in there)
    # Up to the latest turn: with the time since then, the speed would fall until the next one, and jump.
    turning = max((loop.at for loop in there if loop.done == done[slowest]), default=now) - start
    rate = done[slowest] / turning if done[slowest] and turning > 0 else None
    return _meter(done[slowest], total, (max(now - start, 1e-6), rate), there[0].description, behind)


def _meter(done: int, total: int, pace: tuple[float, float | None], description: str, note: str) -> str:
    """Return a bar as tqdm draws it; without tqdm, the numbers.

    ``total`` -1: unknown. ``pace``: seconds until now, and turns per second (None: unknown).
    """
    try:
        from tqdm import tqdm
    except ImportError:
        text = f"{description}: " * bool(description) + (f"{done}/{total}" if total >= 0 else f"{done}")
        return f"{text}, {note}" if note else text
    # One column less: a terminal that wraps at its last column would need two lines.
    width = min(_WIDEST, shutil.get_terminal_size().columns - 1)
    elapsed, rate = pace
    known: Any = total if total >= 0 else None  # None is what tqdm takes for an unknown one
    return str(tqdm.format_meter(done, known, elapsed, ncols=width, prefix=description, postfix=note, rate=rate))
