"""Limits how many unauthenticated connections are served at once: the others wait, and none is refused.

Connections that wait are in the kernel's queue of the listening socket, and cost this process nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from mlaunch.machines.wire.control_protocol import LINE_LIMIT
from mlaunch.rendezvous import store_keys

STRANGERS_LINE = 1024  # bytes of what one says before it has proved itself
# Each costs a descriptor, a task and some memory; all else waits in the kernel, for nothing.
STRANGERS = 512  # connections at a time that have not proved themselves
PATIENCE, CROWDED_PATIENCE = 10.0, 2.0  # seconds that one has for it; as soon as half of the places are taken
_BACKLOG = 65_535  # the system cuts it to its own limit (net.core.somaxconn)
_MOST, _SHOWN = 5, 200  # lines of a kind about strangers, and characters of what one has caused
_PAUSE = 1.0  # seconds, when descriptors are lacking

Receive = Callable[["Guest", asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class StrangersReader(asyncio.StreamReader):
    """Keeps little of what comes, until ``trust``."""

    def __init__(self) -> None:
        super().__init__(limit=STRANGERS_LINE)

    def trust(self) -> None:
        """Takes lines as long as any of ours."""
        self._limit = LINE_LIMIT


class Guest:
    """One connection. It is a stranger until ``known``."""

    def __init__(self, admission: Admission, patience: float) -> None:
        self._admission = admission
        self._stranger = True
        self.patience = patience  # seconds to prove itself

    def known(self, reader: asyncio.StreamReader | None = None) -> None:
        """Makes room for the next stranger; once. ``reader``: of one that has proved itself."""
        if isinstance(reader, StrangersReader):
            reader.trust()
        if self._stranger:
            # Before leave(), which lets the next one in at once.
            self._stranger = False
            self._admission.leave()


class Complaints:
    """Lines about strangers on standard error: few, lest they fill a log."""

    def __init__(self) -> None:
        self._errors = 0
        self._turned_away: set[str] = set()
        self._told_full = False

    def tell_of_error(self, error: Exception) -> None:
        """Says that a connection was closed for an error of ours."""
        self._errors += 1
        if self._errors <= _MOST:
            self._tell(f"the gate closed a connection: {type(error).__name__} {str(error)[:_SHOWN]!a}")

    def tell_of_token(self, address: str, came: str) -> None:
        """Say once of an address that somebody came from there ``came``: it may be a machine that is waited for."""
        if address not in self._turned_away and len(self._turned_away) < _MOST:
            self._turned_away.add(address)
            self._tell(
                f"{address} came {came} and was turned away; if it is a machine of this launch, give it "
                f"the token= or MLAUNCH_TOKEN of this one"
            )

    def tell_of_full_store(self) -> None:
        """Says once that a client was let go since the store may hold no more."""
        if not self._told_full:
            self._told_full = True
            self._tell(
                f"the store of this launch is full, and a rank that asked for more lost its connection: without a "
                f"token, strangers may reach it. Give token=, with which there is no limit, or {store_keys.VARIABLE}= "
                f"with more MiB"
            )

    def _tell(self, text: str) -> None:
        print(f"mlaunch: {text}", file=sys.stderr, flush=True)


class Admission:
    """Accepts connections for ``receive`` until it is closed. It owns the listening socket then."""

    def __init__(self, listener: socket.socket, receive: Receive) -> None:
        self._listener = listener
        self._receive = receive
        self._strangers = 0
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._watch()

    def close(self) -> None:
        """Gives the port back."""
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _watch(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Takes in whoever waits, as long as there is room."""
        while self._strangers < STRANGERS:
            try:
                end, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                # Until then the listener would be ready in each turn of the loop, which could do nothing about it.
                self._loop.call_later(_PAUSE, self._watch)
                break
            self._strangers += 1
            task = self._loop.create_task(self._attend(end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        # The others wait in the kernel's queue, where a burst of machines costs nothing and is not refused.
        self._loop.remove_reader(self._listener)

    def leave(self) -> None:
        self._strangers -= 1
        self._watch()

    async def _attend(self, end: socket.socket) -> None:
        # Half of the places are free for machines whatever strangers do: these are sent away sooner the more there
        # are.
        guest = Guest(self, CROWDED_PATIENCE if 2 * self._strangers > STRANGERS else PATIENCE)
        try:
            with contextlib.suppress(OSError):  # it is gone already
                await self._receive(guest, *await self._streams(end))
        finally:
            guest.known()

    async def _streams(self, end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = StrangersReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.create_connection(lambda: protocol, sock=end)
        except OSError:
            # asyncio closes what it has taken over, and here it has not.
            end.close()
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)
