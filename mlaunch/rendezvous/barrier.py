"""A reusable barrier on a store, which names the processes that came if not all do.

Each arrival adds 1 to a count, which gives it a turn (one use of the barrier) and a position within it. The process
with a turn's last position ends the turn, and all that wait for that end continue. ::

    key/0/count      arrivals so far, in all turns
    key/0/3/2        the mark of the third process that came to the fourth turn: its name
    key/0/3/end      "passed", or the limit of the process that gave up first

After a process has given up, the count no longer says which process belongs to which turn. It is then made so large
that it gives no turn to anybody, and the next arrivals start with a new count under ``key/1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from mlaunch.rendezvous.waiting import wait_for

_PASSED = "passed"
# Far more than any number of arrivals, but small enough that a few of these fit into the store's 64 bits.
_CLOSED = 1 << 40  # added to a count that gives no more turns


class NotAllCameError(Exception):
    """Some processes did not come to the barrier.

    ``came``: the names of those that did. ``limit``: the seconds after which the first one gave up, as text.
    """

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
        """The prefix of the turn's keys."""
        return f"{self.barrier}/{self.number}"

    @property
    def end(self) -> str:
        """The key that is set when the turn is over."""
        return f"{self.place}/end"


class Barrier:
    """The place where ``size`` processes meet under ``key``. All give the same size."""

    def __init__(self, store: dist.Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size

    def meet(self, name: str, timeout: float, put: Callable[[Turn], None] | None = None) -> Turn:
        """Wait until all processes have called this, and return this process's turn.

        Args:
            name: This process's name, for the errors of processes that give up.
            timeout: The limit in seconds.
            put: Called by each process after it has come and before any may leave. All must give one, or none.

        Raises:
            NotAllCameError: The limit passed here or, while this process waited, in another one.
        """
        while True:
            turn = self.enter()
            self._store.set(f"{turn.place}/{turn.position}", name)
            if put is not None:
                put(turn)
            self.arrive(turn, counted=put is not None)
            # Asked after our arrival counts: a process that gave up before could not count on us.
            late = self._store.check([turn.end])
            outcome = self._wait(turn, timeout)
            if outcome == _PASSED:
                # Each process deletes its own mark, so that a barrier in a loop leaves nothing in the store.
                self._store.delete_key(f"{turn.place}/{turn.position}")
                return turn
            # Each process whose turn failed adds it: so it does not matter which is first, and none has to ask.
            self._store.add(f"{turn.barrier}/count", _CLOSED)
            if not late:  # else others gave up before we came, and we try again with the next count
                raise NotAllCameError(self._came(turn), outcome)

    def enter(self) -> Turn:
        """Take the next position, and return the turn with it."""
        generation = 0
        while (count := self._store.add(f"{self._key}/{generation}/count", 1)) >= _CLOSED:
            generation += 1
        return Turn(f"{self._key}/{generation}", *divmod(count - 1, self._size))

    def arrive(self, turn: Turn, *, counted: bool = False, unlimited: bool = False) -> None:
        """End the turn if this process is the last one.

        Args:
            counted: The last process is the one that calls this last, and not the one with the last position.
            unlimited: No process that waits for this turn gives up.
        """
        last = turn.position == self._size - 1
        if counted:
            last = self._store.add(f"{turn.place}/arrived", 1) == self._size
        # Without limits nobody else sets the end, so set() is enough: one operation instead of two.
        if last and unlimited:
            self._store.set(turn.end, _PASSED)
        elif last:
            self._end(turn, _PASSED)
        if last and turn.number > 0:  # all have come to this turn, so all have left the previous one
            for key in ("end", "arrived"):
                self._store.delete_key(f"{turn.barrier}/{turn.number - 1}/{key}")

    def _end(self, turn: Turn, outcome: str) -> None:
        """End the turn with this outcome, unless it has ended already."""
        if self._store.compare_set(turn.end, "", outcome) == outcome.encode():
            # A store without libuv wakes clients that wait for a key only when somebody calls set: without this, the
            # ranks that came first would wait on.
            self._store.set(turn.end, outcome)

    def _wait(self, turn: Turn, timeout: float) -> str:
        """Wait for the turn's end; return "passed", or the limit of the process that gave up first, maybe this one."""
        if not wait_for(self._store, turn.end, timeout):
            self._end(turn, f"{timeout:g}")  # unless the last process came just now
        return self._store.get(turn.end).decode()

    def _came(self, turn: Turn) -> list[str]:
        marks = [f"{turn.place}/{position}" for position in range(self._size)]
        return [self._store.get(mark).decode() for mark in marks if self._store.check([mark])]
