"""Counts what ranks ask of the store when they join."""

from __future__ import annotations

import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import LOOPBACK
from mlaunch.rendezvous.store_client import StoreClient


class _CountingStore:
    """Counts the operations that it passes on to a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        return functools.partial(self._counted, name, operation)

    def _counted(self, name: str, operation: Any, *args: Any) -> Any:
        self.counts[name] += 1
        return operation(*args)


def clients(port: int, namespace: str, size: int) -> list[StoreClient]:
    """Connects that many clients whose operations are counted."""
    with tcp_store.from_files_only():
        made = [StoreClient(LOOPBACK, port, namespace, timedelta(seconds=60)) for _ in range(size)]
    for client in made:
        client.store = _CountingStore(client.store)
        client.connection = _CountingStore(client.connection)
    return made


def asked(client: StoreClient) -> int:
    """Returns how many operations a client has made."""
    return int(client.store.counts.total() + client.connection.counts.total())


def of_joining(port: int, size: int) -> list[int]:
    """Joins that many ranks; returns how many operations each took."""
    ranks = clients(port, f"joining {size}", size)
    for number, client in enumerate(ranks):
        client.arrive(number)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda client: client.meet("joined", size), ranks))
    return [asked(client) for client in ranks]
