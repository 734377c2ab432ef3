"""A rank that waits until an IDE is attached to it, by debugpy, and then runs its function.

With ``debug="debugpy"`` it says where; where debugpy debugs the caller, and follows its children, it goes there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mlaunch.debug.rank.ide_adapter import start_adapter
from mlaunch.rendezvous.address import LOOPBACK


class FollowedSession:
    """Goes to the IDE that debugs the caller. ``address``: as ``DebugTerms.way``; ``who``: "rank 1 of f()"."""

    def __init__(self, address: str, who: str) -> None:
        self._at = json.loads(address)
        self._who = who
        self._attached = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Attach, once, and run it."""
        if not self._attached:
            self._attached = True
            self._attach()
        return function(*args, **kwargs)

    def _attach(self) -> None:
        at = self._at
        sys.path.append(at["path"])
        try:
            import debugpy.server.api  # type: ignore[import-not-found, unused-ignore]  # the caller's
        finally:
            sys.path.remove(at["path"])
        import pydevd  # type: ignore[import-not-found, unused-ignore]  # debugpy's own

        pydevd.SetupHolder.setup = None  # a fork of the caller has one, by which it is a child that the IDE never saw
        print(f"{self._who} is process {os.getpid()}, which the IDE calls Subprocess {os.getpid()}", flush=True)
        try:
            # As a fork of the caller would: debugpy.connect() does not pass the first token on. What the rank starts
            # is not followed, since nobody would attach to a data loader's workers.
            pydevd.settrace(
                at["host"],
                port=at["port"],
                suspend=False,
                patch_multiprocessing=False,
                access_token=at["server_token"],
                client_access_token=at["client_token"],
                ppid=at["parent"],
            )
        except Exception as error:  # the IDE was closed; what debugpy raises then is its own business
            print(f"{self._who} runs without the IDE that debugs its caller: {error!r}", file=sys.stderr, flush=True)
            return
        debugpy.wait_for_client()
        sys.breakpointhook = debugpy.breakpoint


class IdeSession:
    """``who``: "rank 1 of train()". Started once, and made before debugpy is imported."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._pid = os.getpid()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Says how to attach, waits for that, and runs it; ``breakpoint()`` stops in the IDE."""
        import debugpy  # type: ignore[import-not-found, unused-ignore]  # an extra; it imports much

        # debugpy would attach to each process that the rank starts, data loaders too.
        debugpy.configure(subProcess=False)
        # Not debugpy.listen(): its adapter answers every user of the machine, who would run code here.
        for_ides, for_rank, token = start_adapter(self._who)
        print(f"{self._who} waits for an IDE. Its entry in launch.json: {self._entry(for_ides)}", flush=True)
        debugpy.connect((LOOPBACK, for_rank), access_token=token)
        debugpy.wait_for_client()
        sys.breakpointhook = debugpy.breakpoint
        return function(*args, **kwargs)

    def _entry(self, port: int) -> str:
        at = {"host": LOOPBACK, "port": port}
        entry = {"name": self._who, "type": "debugpy", "request": "attach", "connect": at, "justMyCode": False}
        return json.dumps(entry)


def is_followed(debug: str) -> bool:
    """True if the launch's word is the address of an IDE that debugs the caller."""
    return debug.startswith("{")


def is_awaited(debug: str, rank: int) -> bool:
    """Tells whether a rank is to wait. ``debug``: the launch's word, "debugpy" for all, "debugpy:0,2" for some."""
    name, _, ranks = debug.partition(":")
    return name == "debugpy" and (not ranks or str(rank) in ranks.split(","))
