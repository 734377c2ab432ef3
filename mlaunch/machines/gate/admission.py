"""A limit on the unauthenticated connections that are served at once: the others wait, and none is refused.

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

STRANGERS_LINE = 1024  # bytes of a line from a client that has not proved itself
# Each costs a descriptor, a task and some memory; the others wait in the kernel, at no cost.
STRANGERS = 512  # connections at a time that have not proved themselves
# Seconds that a stranger has to prove itself: usually, and while more than half of the places are taken.
PATIENCE, CROWDED_PATIENCE = 10.0, 2.0
_BACKLOG = 65_535  # the system cuts it to its own limit (net.core.somaxconn)
_MOST, _SHOWN = 5, 200  # lines of each kind about strangers, and characters of an error that one has caused
_PAUSE = 1.0  # seconds until the next try, when this process has no descriptor left

Receive = Callable[["Guest", asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class StrangersReader(asyncio.StreamReader):
    """A reader that takes only short lines (``STRANGERS_LINE``) until ``trust``."""

    def __init__(self) -> None:
        super().__init__(limit=STRANGERS_LINE)

    def trust(self) -> None:
        """Accept lines of up to ``LINE_LIMIT`` bytes, as machines of the launch send them."""
        self._limit = LINE_LIMIT


class Guest:
    """One connection. It is a stranger until ``known``."""

    def __init__(self, admission: Admission, patience: float) -> None:
        self._admission = admission
        self._stranger = True
        self.patience = patience  # seconds to prove itself

    def known(self, reader: asyncio.StreamReader | None = None) -> None:
        """Give up this stranger's place to the next one; later calls have no effect.

        ``reader``: the connection's, if the client has proved itself: it may then send long lines.
        """
        if isinstance(reader, StrangersReader):
            reader.trust()
        if self._stranger:
            # Before leave(), which accepts the next connection at once.
            self._stranger = False
            self._admission.leave()


class Complaints:
    """Lines about strangers on standard error: few, so that strangers cannot fill a log."""

    def __init__(self) -> None:
        self._errors = 0
        self._turned_away: set[str] = set()
        self._told_full = False

    def tell_of_error(self, error: Exception) -> None:
        """Print that a connection was closed because of an unexpected error in the gate."""
        self._errors += 1
        if self._errors <= _MOST:
            self._tell(f"the gate closed a connection: {type(error).__name__} {str(error)[:_SHOWN]!a}")

    def tell_of_token(self, address: str, came: str) -> None:
        """Print, once for each address, that a client from there was turned away: the launch may wait for its machine.

        ``came``: without a token, or with another one.
        """
        if address not in self._turned_away and len(self._turned_away) < _MOST:
            self._turned_away.add(address)
            self._tell(
                f"a connection from {address} {came} was turned away; if that is a machine of this launch, give it "
                f"the token= or MLAUNCH_TOKEN of this one"
            )

    def tell_of_full_store(self) -> None:
        """Print once that a client lost its connection because the store is full."""
        if not self._told_full:
            self._told_full = True
            self._tell(
                f"the store of this launch is full, and a rank that asked for more lost its connection. Without a "
                f"token, strangers may reach the store, so it has a limit: give token=, or more MiB by "
                f"{store_keys.VARIABLE}="
            )

    def _tell(self, text: str) -> None:
        print(f"mlaunch: {text}", file=sys.stderr, flush=True)


class Admission:
    """The acceptor of the gate's connections, each of which it hands to ``receive``. It owns the listening socket."""

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
        """Stop accepting, and close the listening socket, so that its port is free."""
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _watch(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept the connections that wait, as long as there are places for strangers."""
        while self._strangers < STRANGERS:
            try:
                end, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                # No descriptor is left: without a pause the listener would be ready in each turn of the loop.
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
        # Strangers keep no more than half of the places for long: above that, each new one has less time.
        guest = Guest(self, CROWDED_PATIENCE if 2 * self._strangers > STRANGERS else PATIENCE)
        try:
            with contextlib.suppress(OSError):  # the client is gone already
                await self._receive(guest, *await self._streams(end))
        finally:
            guest.known()

    async def _streams(self, end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = StrangersReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.create_connection(lambda: protocol, sock=end)
        except OSError:
            # asyncio closes only a socket that it has taken over, and it has not taken over this one.
            end.close()
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)
