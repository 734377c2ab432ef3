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
    """A connection under the launch's own name, so that nothing of one launch is seen by another.

    ``timeout`` is for each operation.
    """

    def __init__(self, address: str, port: int, namespace: str, timeout: timedelta) -> None:
        self._namespace = namespace
        self.connection: Any = connect(address, port, timeout)
        self.store: Any = dist.PrefixStore(namespace, self.connection)  # whose annotations lack ``append``

    def meet(self, key: str, size: int) -> None:
        """Returns once ``size`` ranks have called it with this key, once each; raises as the store does."""
        if hasattr(self.connection, "barrier"):  # one operation instead of three
            self.connection.barrier(f"{self._namespace}/{key}", size)
            return
        barrier = Barrier(self.store, key, size)
        turn = barrier.enter()
        barrier.arrive(turn, unlimited=True)
        self.store.wait([turn.end])

    def drop(self, namespace: str) -> None:
        """Deletes all keys of a namespace that is over: torch never does, and ranks that stay have many."""
        # By torch's own request for a key, which its clients of all releases know, and no other store heeds.
        self.connection.delete_key(f"{namespace}/{ALL}")

    def arrive(self, rank: int) -> None:
        """Leaves a mark for ``missing``."""
        self.store.append(ARRIVED, f"{rank},")

    def missing(self, world_size: int) -> str:
        """Names the ranks that have not arrived, in a bounded text; "" if all have, or nobody could look.

        One rank looks, for all: what each must do does not grow with their number.
        """
        # Whoever comes first; each rank asking for each key would be their number squared, at a moment when all ask.
        if self.store.add(f"{_MISSING}/asked", 1) == 1:
            arrived = {int(rank) for rank in self.store.get(ARRIVED).decode().split(",") if rank}
            lacking = [rank for rank in range(world_size) if rank not in arrived]
            self.store.set(_MISSING, name_some_ranks(lacking) if lacking else "")
        try:
            self.store.wait([_MISSING], _LOOK)
        except RuntimeError:  # who was to look has died
            return ""
        return str(self.store.get(_MISSING), "utf-8")
