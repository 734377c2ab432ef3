"""Hears that a rank has begun to end by failure, before it has ended.

The kernel tells of the end of a process when its memory is gone and its files are closed, 3 ms after a rank was killed.
By then the others have seen their connections close, and each of them describes that. Of the end of a *thread* it tells
at once (Linux 6.9 or later). The threads of a killed process end within microseconds, but for the last of them, which
takes the memory down. So two threads of each rank are watched, one of which is not the last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.system import System
from mlaunch.base.fds import close_all

WATCH_DELAY = 0.05  # seconds into a call: shorter ones are spared the work
_FEW = 64  # ranks: each costs two descriptors


class Endings:
    """``ranks``: those that are not reaped, by pidfd."""

    def __init__(self, ranks: Mapping[int, RankProcess], system: System) -> None:
        self._ranks = ranks
        self._system = system
        self._watched: dict[int, RankProcess] = {}  # by the pidfd of a thread
        self.due: float | None = None  # when ``hear`` begins to watch; None: it has begun, or does not

    def watch_soon(self) -> None:
        """Lets ``hear`` begin to watch, in a moment."""
        self.due = self._system.clock() + WATCH_DELAY

    def fds(self) -> list[int]:
        return list(self._watched)

    def hear(self, ready: Collection[int]) -> bool:
        """Tells whether a rank that has not answered has begun to end by failure, and marks it."""
        if self.due is not None and self._system.clock() >= self.due:
            self._watch()
        failing = False
        # From SIGKILL of 1 of 8 ranks on 2 cores to the exception it takes 21 ms so instead of 30; in three of four
        # launches no other rank has seen its connections close by then, and the report says where all of them were.
        for thread in self._watched.keys() & set(ready):
            rank = self._watched.pop(thread)
            os.close(thread)
            # A thread may end while its process goes on, and a rank may end well: the process's status tells.
            if rank.working and self._system.is_failing(rank.pid):
                rank.ends_at, failing = self._system.clock(), True
        return failing

    def close(self) -> None:
        """Watches no more: all ranks are about to end."""
        self.due = None
        close_all(list(self._watched))
        self._watched.clear()

    def _watch(self) -> None:
        self.due = None
        if len(self._ranks) <= _FEW:
            with contextlib.suppress(OSError):  # no /proc, a rank that has just ended
                for rank in self._ranks.values():
                    self._watched.update((thread, rank) for thread in self._system.watch(rank.pid))
