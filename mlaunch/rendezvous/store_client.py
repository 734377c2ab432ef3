"""A store as its clients use it: they wait for keys, meet at barriers, and a rank meets the others of its launch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mlaunch.base.text import name_some_ranks
from mlaunch.rendezvous.store_keys import ALL, ARRIVED
from mlaunch.rendezvous.tcp_store import connect

# Only with torch 2.6 and 2.7, which have no clone(): it came with 2.8 (pytorch#150966).
_LONGEST_PAUSE = 0.05  # seconds between two questions to the store
_PASSED = "passed"
# Far more than any number of arrivals, but small enough that a few of these fit into the store's 64 bits.
_CLOSED = 1 << 40  # added to a count that gives no more turns
_MISSING = "missing"
_SEARCH_TIMEOUT = timedelta(seconds=10)  # for one rank to find out who is missing


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """True if the key is set within ``timeout`` seconds. Ctrl-C and other signals work meanwhile.

    The store waits in C, where Python handles no signals, and occupies its connection meanwhile. So another thread
    waits, on its own connection.
    """
    if store.check([key]):
        return True
    clone: Any = getattr(store, "clone", None)
    if clone is None:
        return _ask_until(store, key, time.monotonic() + timeout)
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    # A daemon: after Ctrl-C nobody needs the thread, and the store cannot be made to return.
    threading.Thread(target=_wait, args=(clone, key, timeout, answers.put), daemon=True).start()
    error = answers.get()
    if error is None:
        return True
    if "timeout" in str(error).lower():  # the stores raise different types
        return False
    raise error


def _ask_until(store: dist.Store, key: str, deadline: float) -> bool:
    """Ask for the key again and again, with longer and longer pauses; True if it was set before the deadline."""
    pause = 0.001
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _wait(
    clone: Callable[[], dist.Store], key: str, timeout: float, answer: Callable[[Exception | None], None]
) -> None:
    try:
        clone().wait([key], timedelta(seconds=timeout))
        answer(None)
    except Exception as error:  # wait_for() raises it
        answer(error)


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
    """A reusable barrier: ``size`` processes meet under ``key``. If not all come, it names those that did.

    Each arrival adds 1 to a count, which gives it a turn (one use of the barrier) and a position within it. The process
    with a turn's last position ends the turn, and all that wait for that end continue. ::

        key/0/count      arrivals so far, in all turns
        key/0/3/2        the mark of the third process that came to the fourth turn: its name
        key/0/3/end      "passed", or the limit of the process that gave up first

    After a process has given up, the count no longer says which process belongs to which turn. It is then made so large
    that it gives no turn to anybody, and the next arrivals start with a new count under ``key/1``.
    """

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


class StoreClient:
    """A rank's connection to the store. Its keys have the launch's name before them, so no other launch sees them.

    ``timeout``: for the connection, and for each operation.
    """

    def __init__(self, address: str, port: int, namespace: str, timeout: timedelta) -> None:
        self._namespace = namespace
        self.connection: Any = connect(address, port, timeout)
        self.store: Any = dist.PrefixStore(namespace, self.connection)  # Any: its annotations lack ``append``

    def meet(self, key: str, size: int) -> None:
        """Wait until ``size`` ranks have called this with the same key, once each. Raises like the store."""
        if hasattr(self.connection, "barrier"):  # one operation instead of three
            self.connection.barrier(f"{self._namespace}/{key}", size)
            return
        barrier = Barrier(self.store, key, size)
        turn = barrier.enter()
        barrier.arrive(turn, unlimited=True)
        self.store.wait([turn.end])

    def drop(self, namespace: str) -> None:
        """Delete all keys of a namespace that is over: torch never does, and ranks that stay have many namespaces."""
        # With torch's request to delete one key, which clients of all its releases know; other stores delete nothing.
        self.connection.delete_key(f"{namespace}/{ALL}")

    def arrive(self, rank: int) -> None:
        """Leave this rank's mark for ``missing``."""
        self.store.append(ARRIVED, f"{rank},")

    def missing(self, world_size: int) -> str:
        """Return the names of the ranks that have not arrived, in a bounded text; "" if all have, or nobody could look.

        The first rank that calls this looks for all, so the work of each rank does not grow with their number.
        """
        if self.store.add(f"{_MISSING}/asked", 1) == 1:
            arrived = {int(rank) for rank in self.store.get(ARRIVED).decode().split(",") if rank}
            lacking = [rank for rank in range(world_size) if rank not in arrived]
            self.store.set(_MISSING, name_some_ranks(lacking) if lacking else "")
        try:
            self.store.wait([_MISSING], _SEARCH_TIMEOUT)
        except RuntimeError:  # the rank that had to look has died
            return ""
        return str(self.store.get(_MISSING), "utf-8")
