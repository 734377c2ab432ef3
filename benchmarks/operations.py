"""Counts what ranks ask of the store when they join."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from mlaunch.rendezvous import names
from mlaunch.rendezvous.address import LOOPBACK
from mlaunch.rendezvous.store_client import StoreClient


class _CountingStore:
    """Counts the operations that it passes on to a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)


def clients(port: int, namespace: str, size: int) -> list[StoreClient]:
    """Connects that many clients whose operations are counted."""
    with names.from_files_only():
        made = [StoreClient(LOOPBACK, port, namespace, timedelta(seconds=60)) for _ in range(size)]
    for client in made:
        client.store = _CountingStore(client.store)
    return made


def of_joining(port: int, size: int) -> list[int]:
    """Joins that many ranks; returns how many operations each took."""
    ranks = clients(port, f"joining {size}", size)
    for number, client in enumerate(ranks):
        client.arrive(number)
    for client, turn in [(client, client.begin("joined", size)) for client in ranks]:
        client.end(turn)
    return [client.store.counts.total() for client in ranks]
