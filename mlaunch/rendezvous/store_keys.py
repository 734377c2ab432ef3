"""What a launch's store knows, and who waits for what: the semantics of torch's TCPStore, without its sockets.

It differs where torch's would end the whole process: what asks for the impossible gets a LookupError or ValueError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

VARIABLE = "MLAUNCH_STORE_LIMIT"  # MiB
_USUAL = 256
_EACH = 200  # bytes that Python takes for each besides
ARRIVED = "mlaunch/arrived"  # the key to which each rank appends its mark when it comes
ALL = "mlaunch/*"  # deleted under a namespace, it stands for all that is there
_ALL = f"/{ALL}".encode()


def limit_of(environ: Mapping[str, str]) -> int:
    """Returns how many bytes strangers may leave in a store, by its variable. ValueError if that is no number."""
    text = environ.get(VARIABLE) or str(_USUAL)
    if not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{VARIABLE}={text!r}: allowed: MiB, more than 0")
    return int(text) << 20


class StoreFullError(ValueError):
    """A client asks for more than the store may hold."""


class Wait:
    """One client's waiting; ``go`` is called when it is over."""

    def __init__(self, missing: set[bytes], go: Callable[[], None]) -> None:
        self.missing = missing
        self.go = go


class StoreKeys:
    """Values and queues by key. Whatever comes to be, those who wait for it are told of before the call returns.

    ``most``: bytes of all keys and values, and as many of requests and answers on their way, where strangers may be
    among the clients: who asks for more is let go, so that none takes the master's memory. None: no bound. A run of
    weeks leaves gigabytes (3.6 KB for each group of 8 ranks), since torch never deletes what it has put there.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._size = 0
        self._held = 0  # bytes that clients have sent of requests that are not whole, or have not read of answers
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waits: dict[bytes, dict[Wait, None]] = {}  # in the order of their coming
        self._meetings: dict[bytes, dict[Wait, None]] = {}  # those in a ``barrier``, by its key

    # Values

    def set(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        # Before anything has changed: who asks for too much is let go, and nobody else notices.
        self._take_room(len(value) - len(old) if old is not None else _EACH + len(key) + len(value))
        self._values[key] = value
        if key in self._waits:
            self._wake(key, self._waits.pop(key))

    def _take_room(self, size: int) -> None:
        """Counts what is to be kept. StoreFullError if there is no room for it."""
        if self._most is not None and size > 0 and self._size + size > self._most:
            raise StoreFullError(f"a request with {size} bytes; the store holds {self._size} of {self._most}")
        self._size += size

    def hold(self, more: int) -> None:
        """Counts what is kept for clients besides. StoreFullError if that is too much for all together."""
        if self._most is not None and more > 0 and self._held + more > self._most:
            held = f"the store holds {self._held} of {self._most} for its clients"
            raise StoreFullError(f"a request with {more} bytes; {held}")
        self._held += more

    def get(self, key: bytes) -> bytes:
        return self._values[key]

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Sets the value if it is the expected one, b"" for none; returns what it is then, or what was expected."""
        current = self._values.get(key, b"")
        if key not in self._values and expected:
            return expected
        if current != expected:
            return current
        self.set(key, desired)
        return desired

    def add(self, key: bytes, amount: int) -> int:
        """Adds to a number, kept as text; one that nobody has set is 0."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, b"%d" % total)
        return total

    def append(self, key: bytes, value: bytes) -> None:
        self.set(key, self._values.get(key, b"") + value)

    def delete(self, key: bytes) -> int:
        """Returns how many were deleted; with ``ALL`` as its end, the key stands for those of its namespace."""
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
        """Puts a value at the end of a queue; of those who wait for one, the first is told."""
        self._take_room(_EACH + len(key) + len(value))
        self._queues.setdefault(key, deque()).append(value)
        waiting = self._waits.get(key)
        if waiting:
            # One value is for one: all others would wake to find the queue empty.
            first = next(iter(waiting))
            self._forget(self._waits, key, first)
            self._wake(key, [first])

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """Returns a queue's length and first value, which it takes away; 0 and b"" if there is none."""
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
        """Calls ``go`` when all keys are there; at once if they are, and then returns None."""
        missing = {key for key in keys if not self.has([key])}
        if not missing:
            go()
            return None
        wait = Wait(missing, go)
        for key in missing:
            self._waits.setdefault(key, {})[wait] = None
        return wait

    def meet(self, key: bytes, size: int, go: Callable[[], None]) -> Wait | None:
        """Counts one more under a key; calls ``go`` when there are as many as ``size``, as ``wait`` does."""
        if self.add(key, 1) >= size:
            for wait in self._meetings.pop(key, ()):
                wait.go()
            go()
            return None
        wait = Wait({key}, go)
        self._meetings.setdefault(key, {})[wait] = None
        return wait

    def give_up(self, wait: Wait) -> None:
        """Forgets one who waits no more."""
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
