"""One rank's view of the launch's store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mlaunch.base.text import name_some_ranks
from mlaunch.rendezvous.barrier import Barrier
from mlaunch.rendezvous.store_keys import ALL, ARRIVED
from mlaunch.rendezvous.tcp_store import connect

_MISSING = "missing"
_LOOK = timedelta(seconds=10)  # for one rank to find out who is missing


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
            self.store.wait([_MISSING], _LOOK)
        except RuntimeError:  # the rank that had to look has died
            return ""
        return str(self.store.get(_MISSING), "utf-8")
