"""The lines that show how far a launch is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlaunch.base.text import in_bytes, on_a_clock
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.output.bars import loops
from mlaunch.caller.report.history import History
from mlaunch.protocol import late_imports
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages.debug_messages import Visited
from mlaunch.protocol.messages.launch_messages import NamesLeft, Phase
from mlaunch.protocol.messages.machine_messages import MachineSilent, Waiting

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentSays

_NAMES = 3  # that are shown
_RUNNING = {Phase.RUNNING, Phase.COMMANDED, Phase.ANSWERING, Phase.RETURNED, Phase.LEAVING}
_RUNNING |= {Phase.IDLE}  # a rank that stays has come back, or is about to begin


def status_lines(outcome: Outcome, history: History, waiting: str, *, over: bool = False) -> list[str]:
    """Says what the launch is doing, and how far its loops are. ``waiting``: for which other machines.

    ``over``: the call is, though the ranks stay.
    """
    spec = outcome.spec
    size, gone = spec.local_world_size, len(history.gone)
    phase = _end(outcome) if over or gone == size else _phase(outcome, history, waiting)
    line = f"{spec.name}  {on_a_clock(time.monotonic() - history.begun)}  {phase}"
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


def words_on(name: str, record: AgentSays) -> str:
    """Says what the user of the launch is told of a record; "": nothing."""
    if isinstance(record, NamesLeft):
        return _names_left(name, record)
    if isinstance(record, Visited):
        return f"{name} is debugged {'by' if record.held else 'no more: it was by'} mlaunch debug (pid {record.pid})"
    if isinstance(record, MachineSilent):
        return f"{name}: {record.text}"
    return f"{name} waits for its other machines, {record.text}" if isinstance(record, Waiting) else ""


def _names_left(name: str, record: NamesLeft) -> str:
    """Says what nobody will remove."""
    shown = ", ".join(record.paths[:_NAMES]) + (", ..." if record.paths[_NAMES:] else "")
    return (
        f"nobody is left to remove {shown} on host {record.host}, {in_bytes(record.size)} of memory that came during "
        f"{name} and that no process uses any more"
    )
