"""A store for this user's processes on this machine: it serves torch's clients, but not those of other users.

torch's own store answers every client, and any user of the machine can connect to loopback.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading

from mlaunch.rendezvous.peer_user import PeerUser
from mlaunch.rendezvous.store_connection import StoreConnection
from mlaunch.rendezvous.store_keys import StoreKeys

_READ = 1 << 16  # bytes at a time: for more, the allocator asks the kernel each time


class _Client:
    """The connection of one client."""

    def __init__(self, keys: StoreKeys, end: socket.socket, poll: select.epoll) -> None:
        self.end = end
        self.session = StoreConnection(keys, self._send)
        self._poll = poll
        self._unsent = b""
        end.setblocking(False)
        poll.register(end, select.EPOLLIN)

    def serve(self, mask: int) -> bool:
        """Do what can be done now; False if the client is gone, or asks for the impossible."""
        try:
            if mask & select.EPOLLOUT:
                rest, self._unsent = self._unsent, b""
                # First, because _send() asks for EPOLLOUT again if there is not enough room.
                self._poll.modify(self.end, select.EPOLLIN)
                self._send(rest)
                return True
            data = self.end.recv(_READ)
            self.session.feed(data)
        except BlockingIOError:
            return True
        except (OSError, ValueError, LookupError):
            return False
        return bool(data)

    def _send(self, data: bytes) -> None:
        """Send an answer. Requests of a client that does not read its answers have to wait until it does."""
        if not self._unsent:
            with contextlib.suppress(OSError):  # recv() notices a client that is gone
                data = data[self.end.send(data) :]
            if not data:
                return
            self._poll.modify(self.end, select.EPOLLOUT)
        self._unsent += data

    def close(self) -> None:
        self.session.close()
        del self.session  # client and session refer to each other, and the collector may be off
        self.end.close()


class LocalStore:
    """A store that serves in its own thread until ``close``. It owns the listening socket, which is of IPv4."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._keys = StoreKeys()
        self._users = PeerUser()
        self._clients: dict[int, _Client] = {}
        self._poll = select.epoll()
        # Wakes the thread, which sleeps in poll().
        self._closing = os.eventfd(0)
        self._is_full = False  # this process has no descriptor left
        listener.setblocking(False)
        for source in (listener.fileno(), self._closing):
            self._poll.register(source, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close all connections and the listening socket."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for client in self._clients.values():
            client.close()
        for source in (self._listener, self._users, self._poll):
            source.close()
        os.close(self._closing)

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        listening, closing = self._listener.fileno(), self._closing
        while True:
            for source, mask in self._poll.poll():
                if source == closing:
                    return
                if source == listening:
                    self._accept()
                elif not self._clients[source].serve(mask):
                    self._drop(source)

    def _accept(self) -> None:
        try:
            # One for each event: the poll reports the listener again while more wait, and clients that are served
            # already get their turn.
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Else the thread would spin: the connections in the kernel's queue make the listener ready again at once.
            self._is_full = True
            self._poll.unregister(self._listener)
            return
        # A stranger could replace the address where a rank's gloo listens by a port of his own, and so get between
        # two ranks (5 of 5 attempts).
        if self._users.is_ours(end):
            self._clients[end.fileno()] = _Client(self._keys, end, self._poll)
        else:
            end.close()

    def _drop(self, source: int) -> None:
        self._clients.pop(source).close()
        if self._is_full:
            self._is_full = False
            self._poll.register(self._listener, select.EPOLLIN)


_hosted: list[LocalStore] = []


def host(listener: socket.socket) -> None:
    """Host a store on ``listener`` in this process, which must not fork again before ``let_go``.

    Ranks can connect before that, because the socket listens already, and have other work to do until they need the
    store. In a launch over several machines the gate's process has the store, because machines join before ranks are
    forked.
    """
    # A duplicate, because the agent keeps the socket itself, whose number the next launch closes or uses again.
    _hosted.append(LocalStore(listener.dup()))


def let_go() -> None:
    """Close the hosted store, so that this process may fork again."""
    while _hosted:
        _hosted.pop().close()
