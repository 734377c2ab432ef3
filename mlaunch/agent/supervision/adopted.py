"""Reaps what ranks have started and left, as it ends: the agent is the parent that such processes get.

A rank that runs ``os.system("command &")`` at each step would fill the table of processes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mlaunch.agent.supervision.system import System
from mlaunch.base.child_ends import ChildEnds

_WATCH_DELAY = 0.05  # seconds into a launch: shorter ones are spared the work


class Adopted:
    """``own``: the children whose statuses others take."""

    def __init__(self, system: System, own: Callable[[], Collection[int]]) -> None:
        self._system = system
        self._own = own
        self._ends: ChildEnds | None = None
        self.due: float | None = system.clock() + _WATCH_DELAY  # when ``reap`` begins to watch; None: it does

    def fds(self) -> list[int]:
        return [] if self._ends is None else [self._ends.fileno()]

    def reap(self, ready: Collection[int]) -> None:
        """Reaps what has ended, if some child has."""
        if self.due is not None and self._system.clock() >= self.due:
            self.due, self._ends = None, self._system.child_ends()
            self._system.reap(self._own())  # those of before
        elif self._ends is not None and self._ends.fileno() in ready:
            self._ends.take()  # first: who ends from now on is heard of again
            self._system.reap(self._own())

    def close(self) -> None:
        """Watches no more."""
        self.due = None
        if self._ends is not None:
            self._ends.close()
            self._ends = None
