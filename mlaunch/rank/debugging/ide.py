"""A rank that waits until an IDE is attached to it, by debugpy, and then runs its function."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mlaunch.rank.debugging.ide_adapter import start_adapter
from mlaunch.rendezvous.address import LOOPBACK


class IdeSession:
    """``who``: "rank 1 of train()". Started once, and made before debugpy is imported."""

    def __init__(self, who: Callable[[], str]) -> None:
        self._who = who
        self._pid = os.getpid()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Says how to attach, waits for that, and runs it; ``breakpoint()`` stops in the IDE."""
        import debugpy  # type: ignore[import-not-found, unused-ignore]  # an extra; it imports much

        # debugpy would attach to each process that the rank starts, data loaders too.
        debugpy.configure(subProcess=False)
        # Not debugpy.listen(): its adapter answers every user of the machine, who would run code here.
        for_ides, for_rank, token = start_adapter(self._who())
        print(f"{self._who()} waits for an IDE. Its entry in launch.json: {self._entry(for_ides)}", flush=True)
        debugpy.connect((LOOPBACK, for_rank), access_token=token)
        debugpy.wait_for_client()
        sys.breakpointhook = debugpy.breakpoint
        return function(*args, **kwargs)

    def _entry(self, port: int) -> str:
        at = {"host": LOOPBACK, "port": port}
        entry = {"name": self._who(), "type": "debugpy", "request": "attach", "connect": at, "justMyCode": False}
        return json.dumps(entry)


def is_awaited(debug: str, rank: int) -> bool:
    """Tells whether a rank is to wait. ``debug``: the launch's word, "debugpy" for all, "debugpy:0,2" for some."""
    name, _, ranks = debug.partition(":")
    return name == "debugpy" and (not ranks or str(rank) in ranks.split(","))
