"""The lines that show how far a launch is."""

from __future__ import annotations

import time

from mlaunch.base.text import on_a_clock
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.report.history import History
from mlaunch.display.caller.bars import loops
from mlaunch.protocol import late_imports
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Phase

_RUNNING = {Phase.RUNNING, Phase.COMMANDED, Phase.ANSWERING, Phase.RETURNED, Phase.LEAVING}
_RUNNING |= {Phase.IDLE}  # a rank that stays has come back, or is about to begin


def status_lines(outcome: Outcome, history: History, waiting: str, *, over: bool = False) -> list[str]:
    """Says what the launch is doing, and how far its loops are. ``waiting``: for which other machines.

    ``over``: the call is, though the ranks stay.
    """
    spec = outcome.spec
    size, gone = spec.local_world_size, len(history.gone)
    phase = _end(outcome) if over or gone == size else _phase(outcome, history, waiting)
    line = f"{spec.call.name}  {on_a_clock(time.monotonic() - history.begun)}  {phase}"
    done = f", {gone} of {size} ranks done" if 0 < gone < size else ""
    return [line + done, *loops(history.board, spec.rank_start, size, history.begun)]


def _end(outcome: Outcome) -> str:
    return "failed" if outcome.failures else "stopped" if outcome.stopped else "done"


def _phase(outcome: Outcome, history: History, waiting: str) -> str:
    size = outcome.spec.local_world_size
    if history.board is None:
        return f"joining, {waiting}" if waiting else "starting"
    if outcome.failures or outcome.stopped:
        return "stopping"
    phase = _phase_of_all(history.board, size)
    module = next(filter(None, (history.board.importing(local_rank) for local_rank in range(size))), "")
    if not module:
        return phase
    return f"{phase}, importing {module}{', which later calls find imported' if module in late_imports.NAMES else ''}"


def _phase_of_all(board: Board, size: int) -> str:
    phases = {board[local_rank] for local_rank in range(size)}
    return "running" if phases <= _RUNNING else "starting"
