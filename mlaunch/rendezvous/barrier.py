"""A barrier on a store that may be used again, and that tells who came when not all do.

Each arrival adds 1 to a count, which gives it a turn (one use of the barrier) and a position within it. Whoever takes
a turn's last position ends it, and all who wait for that end go on. ::

    key/0/count      arrivals so far, in all turns
    key/0/3/2        the mark of the third to come to the fourth turn: its name
    key/0/3/end      "passed", or the limit of the one who gave up first

After one has given up, the count no longer says who belongs to which turn. It is then made so large that it counts
for nobody, and the next arrivals begin anew under ``key/1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from mlaunch.rendezvous.waiting import wait_for

_PASSED = "passed"
# Far beyond any number of arrivals, and so that a few of these still fit into the store's 64 bits.
_CLOSED = 1 << 40  # added to a count that is to count for nobody


class NotAllCameError(Exception):
    """``came``: the names of those who did. ``limit``: the seconds after which the first gave up, as text."""

    def __init__(self, came: list[str], limit: str) -> None:
        super().__init__(came, limit)
        self.came = came
        self.limit = limit


@dataclass(frozen=True)
class Turn:
    """One process's part in one use of a barrier."""

    barrier: str
    number: int
    position: int

    @property
    def place(self) -> str:
        """Where the turn's keys are."""
        return f"{self.barrier}/{self.number}"

    @property
    def end(self) -> str:
        """The key that is set when the turn is over."""
        return f"{self.place}/end"


class Barrier:
    """Where ``size`` processes meet under ``key``. Each makes an object for each use, with the same size."""

    def __init__(self, store: dist.Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size

    def meet(self, name: str, timeout: float, put: Callable[[Turn], None] | None = None) -> Turn:
        """Returns once all have called it.

        Args:
            name: Ours, for those who wait.
            timeout: The limit in seconds.
            put: What each does after it has come and before any may leave. All must give one, or none.

        Raises:
            NotAllCameError: The limit passed here or, while we waited, for another.
        """
        while True:
            turn = self.enter()
            self._store.set(f"{turn.place}/{turn.position}", name)
            if put is not None:
                put(turn)
            self.arrive(turn, counted=put is not None)
            # Asked once we count: whoever has given up before cannot have counted on us.
            late = self._store.check([turn.end])
            outcome = self._wait(turn, timeout)
            if outcome == _PASSED:
                # Each takes its own mark away, so a barrier in a loop leaves nothing behind in the store.
                self._store.delete_key(f"{turn.place}/{turn.position}")
                return turn
            # Each of those who gave up adds it: which of them is first does not matter, and nobody need be asked.
            self._store.add(f"{turn.barrier}/count", _CLOSED)
            if not late:  # else others gave up before we came: we are the first of those who try again
                raise NotAllCameError(self._came(turn), outcome)

    def enter(self) -> Turn:
        """Takes the next position."""
        generation = 0
        while (count := self._store.add(f"{self._key}/{generation}/count", 1)) >= _CLOSED:
            generation += 1
        return Turn(f"{self._key}/{generation}", *divmod(count - 1, self._size))

    def arrive(self, turn: Turn, *, counted: bool = False, unlimited: bool = False) -> None:
        """Ends the turn if this is the last to come.

        Args:
            counted: The last is who calls this last, wherever it entered.
            unlimited: None of those who wait gives the turn up.
        """
        last = turn.position == self._size - 1
        if counted:
            last = self._store.add(f"{turn.place}/arrived", 1) == self._size
        # Nobody gives up in writing, so there is nothing to compare with: one operation instead of two.
        if last and unlimited:
            self._store.set(turn.end, _PASSED)
        elif last:
            self._end(turn, _PASSED)
        if last and turn.number > 0:  # all have come to this turn, so all have left the one before
            for key in ("end", "arrived"):
                self._store.delete_key(f"{turn.barrier}/{turn.number - 1}/{key}")

    def _end(self, turn: Turn, outcome: str) -> None:
        """Ends the turn so, unless it has ended. Only ``set`` wakes those who wait at a store without libuv."""
        if self._store.compare_set(turn.end, "", outcome) == outcome.encode():
            # Such a store wakes those who wait for a key at set alone; a barrier once left the ranks waiting that
            # came first.
            self._store.set(turn.end, outcome)

    def _wait(self, turn: Turn, timeout: float) -> str:
        """Waits for the turn's end; returns "passed", or the limit of the one who gave up first, maybe ours."""
        if not wait_for(self._store, turn.end, timeout):
            self._end(turn, f"{timeout:g}")  # unless the last came just now
        return self._store.get(turn.end).decode()

    def _came(self, turn: Turn) -> list[str]:
        marks = [f"{turn.place}/{position}" for position in range(self._size)]
        return [self._store.get(mark).decode() for mark in marks if self._store.check([mark])]
