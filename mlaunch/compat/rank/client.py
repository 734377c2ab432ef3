"""MegEngine's client: processes share values under names, barriers and broadcasts, without collectives.

Every wait has a limit, and its error says who is missing. Values are pickled, and
signed with the server's secret; a value without that signature is never unpickled.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mlaunch.compat.wire import Signer, known_secret, secret_variable
from mlaunch.rendezvous.store_client import Barrier, NotAllCameError, Turn, wait_for
from mlaunch.rendezvous.tcp_store import connect

_SPACE = "mlaunch/user"
_NOTHING = "nothing"  # neither a pickle nor a number
_KEPT = 2  # versions of a value, for readers that are about to read one
_SLICE = 10.0  # seconds
_LONGEST = 8 * 1024 * 1024 - 4096  # bytes of a value: torch's store hangs up beyond 8 MiB; less a signature


class Client:
    """A connection to a ``Server``, or to the store of this process's group (``get_client()``).

    Several threads may use it.

    Args:
        master_ip: The server's address or host name.
        port: Its port.
        timeout: Limit in seconds for reaching the server, and for each operation that waits.
        store: An existing connection, instead of an address.
        secret: The server's (``Server.secret``), which signs values; nothing else is unpickled. None: from the
            environment, which children of the server's process inherit. Barriers need none.

    Raises:
        ConnectionError: The server could not be reached within ``timeout``.
    """

    def __init__(
        self,
        master_ip: str = "localhost",
        port: int = 0,
        *,
        timeout: float = 1800.0,
        store: dist.Store | None = None,
        secret: str | None = None,
    ) -> None:
        if store is None:
            if port == 0:
                raise ValueError("port=0: a client must know the port on which the server listens")
            store = _connect(master_ip.strip("[]"), port, timeout)
        self._store: Any = dist.PrefixStore(_SPACE, store)  # its annotations lack bytes and ``append``
        self._timeout = timeout
        self._seen: dict[str, int] = {}  # by place: the highest version
        secret = known_secret(port) if secret is None else secret
        self._signer = None if secret is None else Signer(secret)
        self._variable = secret_variable(port)

    def user_set(self, key: str, val: Any) -> None:
        """Set a picklable value under a name, in place of an earlier one. Does not wait."""
        place, signer = f"value/{key}", self._known_signer(f"user_set({key!r})")
        data = _pickled(val, f"user_set({key!r})")
        # The store can neither read without waiting nor compare and delete; so each value is a version, numbered and
        # claimed by counters, to which the store adds atomically.
        version = self._store.add(f"{place}/version", 1)
        self._store.set(f"{place}/{version}", signer.sign(f"{place}/{version}", data))
        # Not the last version: somebody may have read its number but not its value.
        for name in (f"{place}/{version - _KEPT}", f"{place}/{version - _KEPT}/taken"):
            self._store.delete_key(name)

    def user_get(self, key: str, timeout: float | None = None) -> Any:
        """Return the value under a name, which stays there; wait until there is one. TimeoutError after the limit."""
        return self._wait_for_value(key, f"user_get({key!r})", timeout, take=False)

    def user_pop(self, key: str, timeout: float | None = None) -> Any:
        """Return the value, as ``user_get``, and remove it: of several callers exactly one gets it."""
        return self._wait_for_value(key, f"user_pop({key!r})", timeout, take=True)

    def _wait_for_value(self, key: str, what: str, timeout: float | None, *, take: bool) -> Any:
        self._known_signer(what)
        place, limit = f"value/{key}", self._limit(timeout)
        deadline = time.monotonic() + limit
        while True:
            seen = self._seen.get(place, 0)  # before another thread sees a later one
            version = self._store.add(f"{place}/version", 0)
            if version < seen:
                raise ValueError(f"{what}: the store has gone back to version {version}: somebody else writes to it")
            self._seen[place] = version
            taken = self._peek(f"{place}/{version}/taken") is not None
            value = None if taken else self._peek(f"{place}/{version}")
            if value is not None and (not take or self._store.add(f"{place}/{version}/taken", 1) == 1):
                return self._unpack(f"{place}/{version}", value, what)
            awaited = version + 1 if taken or value is not None or version == 0 else version
            left = deadline - time.monotonic()
            # In slices: a version that others replace meanwhile never comes.
            if not wait_for(self._store, f"{place}/{awaited}", max(0.001, min(left, _SLICE))) and left <= _SLICE:
                raise TimeoutError(f"{what}: nobody has set it within {limit:g} s")

    def _peek(self, key: str) -> bytes | None:
        """Return the value if there is one now, else None; the store's own ``get`` would wait."""
        found: bytes = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def group_barrier(self, key: str, size: int, timeout: float | None = None) -> None:
        """Return once ``size`` processes have called it with this key. The key may be used again.

        Raises:
            TimeoutError: After the limit; it names the ranks (or processes) that came, and how many did not.
        """
        self._meet(f"barrier/{key}", size, f"group_barrier({key!r})", timeout)

    def bcast_val(self, val: Any, key: str, size: int, timeout: float | None = None) -> Any:
        """Return to all ``size`` callers the value of the one that does not pass None.

        If all pass None, all get None. The key may be used again.

        Raises:
            TimeoutError: After the limit; it names the ranks (or processes) that came, and how many did not.
        """
        what = f"bcast_val(..., {key!r})"
        signer, data = self._known_signer(what), _pickled(val, what)

        def put(turn: Turn) -> None:
            if val is not None:
                self._store.set(f"{turn.place}/value", signer.sign(f"{turn.place}/value", data))

        value = f"{self._meet(f'bcast/{key}', size, what, timeout, put).place}/value"
        sent = self._peek(value)
        found = None if sent is None else self._unpack(value, sent, what)
        # The last reader deletes it: only that one knows that all have it.
        if self._store.add(f"{value}/read", 1) == size:
            self._store.delete_key(value)
            self._store.delete_key(f"{value}/read")
        return found

    def _meet(
        self, place: str, size: int, what: str, timeout: float | None, put: Callable[[Turn], None] | None = None
    ) -> Turn:
        try:
            return Barrier(self._store, place, size).meet(_name(), self._limit(timeout), put)
        except NotAllCameError as error:
            names = ", ".join(error.came) + _absent(place.partition("/")[2], error.came)
            raise TimeoutError(f"{what}: {len(error.came)} of {size} came within {error.limit} s: {names}") from None

    def _known_signer(self, what: str) -> Signer:
        if self._signer is None:
            raise ValueError(
                f"{what}: this client has no secret to sign values with; give it secret=server.secret, or start its "
                f"process with {self._variable} in the environment"
            )
        return self._signer

    def _unpack(self, place: str, signed: bytes, what: str) -> Any:
        pickled = self._known_signer(what).open(place, signed)
        # Before it is unpickled, which runs any code that the writer has chosen.
        if pickled is None:
            raise ValueError(f"{what}: the value has another signature: it was set by a client with another secret")
        return pickle.loads(pickled)

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout


def _pickled(value: Any, what: str) -> bytes:
    data = pickle.dumps(value)
    if len(data) > _LONGEST:
        raise ValueError(
            f"{what}: the value takes {len(data)} bytes pickled, and the store takes {_LONGEST} at most; "
            f"exchange it by mlaunch.comm, or put it into a file and its path here"
        )
    return data


def _connect(address: str, port: int, timeout: float) -> dist.Store:
    try:
        socket.create_connection(
            (address, port), timeout
        ).close()  # torch would wait for the whole limit, and name nothing
        return connect(address, port, timedelta(seconds=timeout))
    except (OSError, dist.DistError) as error:
        raise ConnectionError(f"no rendezvous server answers at {address}, port {port}: {error}") from error


def _name() -> str:
    rank = os.environ.get("RANK")
    return f"rank {rank}" if rank is not None else f"{socket.gethostname()} pid {os.getpid()}"


def _absent(key: str, came: list[str]) -> str:
    """Return the ranks that did not come, if the key lists the ranks of a group, as MegEngine's do; else ""."""
    members = key.split(",")
    if not all(member.isdigit() for member in members):
        return ""
    absent = [member for member in members if f"rank {member}" not in came]
    return f"; missing: rank {', '.join(absent)}" if absent else ""
