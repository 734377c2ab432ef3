"""The contents of a launch's store, and the clients that wait for keys: torch's TCPStore, without its sockets.

It differs in one way: a request for the impossible raises LookupError or ValueError, where torch's store would end the
whole process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

VARIABLE = "MLAUNCH_STORE_LIMIT"  # MiB
_USUAL = 256
_EACH = 200  # bytes that Python takes for each value in addition
ARRIVED = "mlaunch/arrived"  # the key to which each rank appends its mark when it comes
ALL = "mlaunch/*"  # to delete this key of a namespace deletes all keys there
_ALL = f"/{ALL}".encode()


def limit_of(environ: Mapping[str, str]) -> int:
    """Return how many bytes strangers may leave in a store, from ``VARIABLE``. ValueError if it is not valid."""
    text = environ.get(VARIABLE) or str(_USUAL)
    if not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{VARIABLE}={text!r}: allowed: MiB, more than 0")
    return int(text) << 20


class StoreFullError(ValueError):
    """A client asks for more than the store may hold."""


class Wait:
    """One client's wait for keys, or in a barrier. ``missing``: keys that are not there; ``go``: called at its end."""

    def __init__(self, missing: set[bytes], go: Callable[[], None]) -> None:
        self.missing = missing
        self.go = go


class StoreKeys:
    """Values and queues by key. A call that adds a key also calls ``go`` of each wait that it ends.

    ``most``: a limit in bytes for all keys and values together, and the same again for unfinished requests, for a store
    that strangers can reach. A client that asks for more loses its connection, so that none can fill the master's
    memory. None: no limit, because a run of weeks leaves gigabytes (3.6 KB for each group of 8 ranks): torch deletes
    none of its keys.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._size = 0
        self._held = 0  # bytes of requests that clients have not finished
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waits: dict[bytes, dict[Wait, None]] = {}  # in the order in which they came
        self._meetings: dict[bytes, dict[Wait, None]] = {}  # the clients in a ``barrier``, by its key

    # Values

    def set(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        # Before anything has changed: so no other client notices that one asked for too much.
        self._take_room(len(value) - len(old) if old is not None else _EACH + len(key) + len(value))
        self._values[key] = value
        if key in self._waits:
            self._wake(key, self._waits.pop(key))

    def _take_room(self, size: int) -> None:
        """Count bytes that the store will keep. StoreFullError if there is no room for them."""
        if self._most is not None and size > 0 and self._size + size > self._most:
            raise StoreFullError(f"a request with {size} bytes; the store holds {self._size} of {self._most}")
        self._size += size

    def hold(self, more: int) -> None:
        """Count bytes that are kept for clients in addition. StoreFullError if all clients together hold too much.

        ``more``: may be negative.
        """
        if self._most is not None and more > 0 and self._held + more > self._most:
            held = f"the store holds {self._held} of {self._most} for its clients"
            raise StoreFullError(f"a request with {more} bytes; {held}")
        self._held += more

    def get(self, key: bytes) -> bytes:
        return self._values[key]

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set the value to ``desired`` if it is the expected one (b"": no value); return the value after that.

        If there is no value, but one was expected, return the expected one, as torch's store does.
        """
        current = self._values.get(key, b"")
        if key not in self._values and expected:
            return expected
        if current != expected:
            return current
        self.set(key, desired)
        return desired

    def add(self, key: bytes, amount: int) -> int:
        """Add to a number, which is kept as text and is 0 at first; return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, b"%d" % total)
        return total

    def append(self, key: bytes, value: bytes) -> None:
        self.set(key, self._values.get(key, b"") + value)

    def delete(self, key: bytes) -> int:
        """Delete a key or, if it ends with ``ALL``, all keys of its namespace; return how many values were deleted."""
        space = key.removesuffix(_ALL)
        if space != key:
            return self._drop(space + b"/")
        old = self._values.pop(key, None)
        if old is None:
            return 0
        self._size -= _EACH + len(key) + len(old)
        return 1

    def _drop(self, space: bytes) -> int:
        values = [key for key in self._values if key.startswith(space)]
        for key in values:
            self.delete(key)
        for key in [key for key in self._queues if key.startswith(space)]:
            while self.pop(key)[0]:
                pass
        return len(values)

    def count(self) -> int:
        return len(self._values)

    def names(self) -> Sequence[bytes]:
        return list(self._values)

    def has(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values or key in self._queues for key in keys)

    # Queues

    def push(self, key: bytes, value: bytes) -> None:
        """Put a value at the end of a queue, and wake the first client that waits for the queue."""
        self._take_room(_EACH + len(key) + len(value))
        self._queues.setdefault(key, deque()).append(value)
        waiting = self._waits.get(key)
        if waiting:
            # Only one client can take the value: all others would find the queue empty.
            first = next(iter(waiting))
            self._forget(self._waits, key, first)
            self._wake(key, [first])

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """Remove a queue's first value, and return the length before that and the value; 0 and b"" for no queue."""
        queue = self._queues.get(key)
        if queue is None:
            return 0, b""
        length, value = len(queue), queue.popleft()
        self._size -= _EACH + len(key) + len(value)
        if not queue:
            del self._queues[key]
        return length, value

    def length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    # Waiting

    def wait(self, keys: Sequence[bytes], go: Callable[[], None]) -> Wait | None:
        """Call ``go`` when all keys are there. Return the wait, or None if ``go`` was called at once."""
        missing = {key for key in keys if not self.has([key])}
        if not missing:
            go()
            return None
        wait = Wait(missing, go)
        for key in missing:
            self._waits.setdefault(key, {})[wait] = None
        return wait

    def meet(self, key: bytes, size: int, go: Callable[[], None]) -> Wait | None:
        """Count one more client under a key; call ``go`` when there are ``size`` of them. Return like ``wait``."""
        if self.add(key, 1) >= size:
            for wait in self._meetings.pop(key, ()):
                wait.go()
            go()
            return None
        wait = Wait({key}, go)
        self._meetings.setdefault(key, {})[wait] = None
        return wait

    def give_up(self, wait: Wait) -> None:
        """Forget a wait whose client has given up."""
        for key in wait.missing:
            self._forget(self._waits, key, wait)
            self._forget(self._meetings, key, wait)

    @staticmethod
    def _forget(waiting: dict[bytes, dict[Wait, None]], key: bytes, wait: Wait) -> None:
        waits = waiting.get(key, {})
        waits.pop(wait, None)
        if not waits:
            waiting.pop(key, None)

    def _wake(self, key: bytes, waits: Iterable[Wait]) -> None:
        for wait in waits:
            wait.missing.discard(key)
            if not wait.missing:
                wait.go()
