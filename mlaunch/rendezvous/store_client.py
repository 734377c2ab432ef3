"""One rank's view of the launch's store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from mlaunch.rendezvous.barrier import Barrier
from mlaunch.rendezvous.tcp_store import connect


class StoreClient:
    """A connection under the launch's own name, so that nothing of one launch is seen by another.

    ``timeout`` is for each operation.
    """

    def __init__(self, address: str, port: int, namespace: str, timeout: timedelta) -> None:
        self.store = dist.PrefixStore(namespace, connect(address, port, timeout))

    def meet(self, key: str, size: int) -> None:
        """Returns once ``size`` ranks have called it with this key; raises as the store does after ``timeout``."""
        barrier = Barrier(self.store, key, size)
        turn = barrier.enter()
        barrier.arrive(turn)
        self.store.wait([turn.end])

    def arrive(self, rank: int) -> None:
        """Leaves a mark for ``missing``."""
        self.store.set(f"arrived/{rank}", "")

    def missing(self, world_size: int) -> list[int]:
        """Returns the ranks that have not arrived."""
        return [rank for rank in range(world_size) if not self.store.check([f"arrived/{rank}"])]
