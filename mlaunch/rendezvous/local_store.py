"""A store for this user's processes on this machine: torch's clients are served, other users are not.

torch's own store answers whoever connects, and on loopback everybody on the machine can.
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
    """One connection."""

    def __init__(self, keys: StoreKeys, end: socket.socket, poll: select.epoll) -> None:
        self.end = end
        self.session = StoreConnection(keys, self._send)
        self._poll = poll
        self._unsent = b""
        end.setblocking(False)
        poll.register(end, select.EPOLLIN)

    def serve(self, mask: int) -> bool:
        """Does what can be done now; False: the client is gone, or asks for what cannot be."""
        try:
            if mask & select.EPOLLOUT:
                rest, self._unsent = self._unsent, b""
                # Before the rest is sent: that listens for room again if there is too little.
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
        """Sends an answer. One that does not read its answers is not listened to until it has."""
        if not self._unsent:
            with contextlib.suppress(OSError):  # of one that is gone, reading tells
                data = data[self.end.send(data) :]
            if not data:
                return
            self._poll.modify(self.end, select.EPOLLOUT)
        self._unsent += data

    def close(self) -> None:
        self.session.close()
        del self.session  # each refers to the other, and the collector may be off
        self.end.close()


class LocalStore:
    """Serves in a thread of its own until ``close``. It owns the listening socket, which is of IPv4."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._keys = StoreKeys()
        self._users = PeerUser()
        self._clients: dict[int, _Client] = {}
        self._poll = select.epoll()
        # The thread sleeps in poll(), which nothing else of this process wakes.
        self._closing = os.eventfd(0)
        self._is_full = False  # descriptors are lacking
        listener.setblocking(False)
        for source in (listener.fileno(), self._closing):
            self._poll.register(source, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for client in self._clients.values():
            client.close()
        for source in (self._listener, self._users, self._poll):
            source.close()
        os.close(self._closing)

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
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
            # One for each event: the listener tells again while more wait, and clients that are served already get
            # their turn.
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Without that the thread would spin: what waits in the kernel's queue makes the listener ready again at
            # once.
            self._is_full = True
            self._poll.unregister(self._listener)
            return
        # Whoever reads here where gloo listens, and writes a port of his own there, stands between two ranks (5 of
        # 5).
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
    """Hosts a store on ``listener`` in this process, which forks nothing until it lets go of it.

    The ranks can already connect, since the socket listens, and have work to do until they need it. In a launch over
    several machines the gate's process has the store, since machines join before ranks are forked.
    """
    # A descriptor of its own: the agent still has the socket, whose number the next launch closes or uses again.
    _hosted.append(LocalStore(listener.dup()))


def let_go() -> None:
    """Ends the store and its thread, so that this process may fork again."""
    while _hosted:
        _hosted.pop().close()
