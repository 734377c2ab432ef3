"""The line of ``mlaunch.progress``: one bar for all ranks of this machine, at the pace of the slowest."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

from mlaunch.protocol.board import Board, Loop

_WIDEST = 100  # characters


def loops(board: Board | None, rank_start: int, size: int, since: float = 0.0) -> list[str]:
    """Returns the line of the latest loop that a rank has come to ``since`` then; none before the first."""
    if board is None:
        return []
    found = [board.loop(local_rank) for local_rank in range(size)]
    found = [loop if loop.start >= since else replace(loop, number=0, done=0) for loop in found]
    latest = max(loop.number for loop in found)
    return [line(found, latest, rank_start)] if latest else []


def line(found: list[Loop], number: int, rank_start: int) -> str:
    """Returns the bar of one loop, of which some ranks may be through, and others before it."""
    there = [loop for loop in found if loop.number == number]
    total = max(loop.total for loop in there)
    done = [loop.done if loop.number == number else 0 for loop in found]
    slowest = min(range(len(done)), key=done.__getitem__)
    spread = max(done) - done[slowest]
    behind = f"rank {rank_start + slowest} is {spread} behind" if spread else ""
    through = all(loop.done == loop.total for loop in found)
    now = max(loop.at for loop in there) if through else time.monotonic()
    start = min(loop.start for loop in there)
    # Up to the turn that was counted last: with the time since then, the speed would fall until the next, and jump.
    turning = max((loop.at for loop in there if loop.done == done[slowest]), default=now) - start
    rate = done[slowest] / turning if done[slowest] and turning > 0 else None
    return meter(done[slowest], total, (max(now - start, 1e-6), rate), there[0].description, behind)


def meter(done: int, total: int, pace: tuple[float, float | None], description: str, note: str) -> str:
    """Draws it as tqdm does; without tqdm the bare numbers.

    ``total`` -1: not known. ``pace``: seconds until now, and turns per second; None: not known.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        text = f"{description}: " * bool(description) + (f"{done}/{total}" if total >= 0 else f"{done}")
        return f"{text}, {note}" if note else text
    # One column less: a terminal that wraps at its last one would need two lines.
    width = min(_WIDEST, shutil.get_terminal_size().columns - 1)
    elapsed, rate = pace
    known: Any = total if total >= 0 else None  # None is what tqdm takes for an unknown one
    return str(tqdm.format_meter(done, known, elapsed, ncols=width, prefix=description, postfix=note, rate=rate))
