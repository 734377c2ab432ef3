"""The server of a launch's store: its answers to one client, in the protocol of torch's own store, and its thread.

torch's own store answers every client, and any user of the machine can connect to loopback. This one does not answer
processes of other users. Over several machines there is no thread: the gate serves those that have joined.

A test fails as soon as torch changes the protocol. A client with an unknown request is refused, and a warning says
which releases of torch were tried.

A request is a byte that says what the client asks, then strings (each after its length), then maybe a number. In some
requests, the number of strings comes first. All numbers are little-endian; most, such as lengths, have 8 bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from mlaunch.rendezvous.peer_user import PeerUser
from mlaunch.rendezvous.store_keys import StoreKeys, Wait

SIZE, NUMBER, SHORT = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<I")
# In the first request of each torch client; torch's server closes connections of other clients.
_MAGIC = 0x3C85F7CE
_MOST_STRINGS = 1 << 17  # strings in a request; like the next one, the limit of torch's own store
LONGEST = 1 << 23  # bytes of a string
_EACH = 40  # bytes that Python takes for a string in addition
GO, GIVEN_UP = b"\0", b"\1"
_READY, _NOT_READY = b"\0", b"\1"
_GREETING = 8  # bytes, at most, that a client sends before its greeting is complete
_READ = 1 << 16  # bytes at a time: for more, the allocator asks the kernel each time


class UnknownRequestError(ValueError):
    """A client has made a request that none of the tried releases of torch makes."""


class Asked(IntEnum):
    """The first byte of a request: what the client asks."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    COUNT = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    GIVE_UP = 12
    PING = 13
    PUSH = 14
    POP = 15
    LENGTH = 16
    NAMES = 17
    MEET = 18


_CODES = frozenset(Asked)
# How many strings follow: so many, or so many for each one of a count that comes first.
_STRINGS = {
    Asked.SET: 2, Asked.COMPARE_SET: 3, Asked.GET: 1, Asked.ADD: 1, Asked.DELETE: 1, Asked.APPEND: 2, Asked.PUSH: 2,
    Asked.POP: 1, Asked.LENGTH: 1, Asked.MEET: 1,
}  # fmt: skip
_COUNTED = {Asked.CHECK: 1, Asked.WAIT: 1, Asked.MULTI_GET: 1, Asked.MULTI_SET: 2}
_NUMBERS = {Asked.VALIDATE: SHORT, Asked.PING: SHORT, Asked.ADD: NUMBER, Asked.MEET: NUMBER}


@dataclass
class Request:
    """One request, as far as it has come. ``lacking``: how many strings; None if their count has not come yet."""

    asked: Asked
    lacking: int | None
    strings: list[bytes]
    number: int = 0


class Requests:
    """The parser of a client's requests, whose bytes come in pieces of any size. It reads no byte twice."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._open: Request | None = None
        self._taken = 0  # bytes that the strings of the open request take

    @property
    def unfinished(self) -> int:
        """How many bytes of an incomplete request are kept."""
        return len(self._data) + self._taken

    def feed(self, piece: bytes) -> Iterator[Request]:
        """Yield the requests that are complete with this piece. ValueError for bytes that no torch client sends."""
        self._data += piece
        while (request := self._next()) is not None:
            yield request
        # Once for each piece and not for each request, because each cut moves the rest.
        del self._data[: self._at]
        self._at = 0

    def _next(self) -> Request | None:
        request = self._open
        if request is None:
            code = self._take(1)
            if code is None:
                return None
            if code[0] not in _CODES:
                raise UnknownRequestError(f"request {code[0]}")
            asked = Asked(code[0])
            request = self._open = Request(asked, None if asked in _COUNTED else _STRINGS.get(asked, 0), [])
        return request if self._complete(request) else None

    def _complete(self, request: Request) -> bool:
        if request.lacking is None:
            count = self._take(SIZE.size)
            if count is None:
                return False
            request.lacking = _bounded(SIZE.unpack(count)[0], _MOST_STRINGS) * _COUNTED[request.asked]
        if not self._take_strings(request):
            return False
        kind = _NUMBERS.get(request.asked)
        if kind is not None:
            number = self._take(kind.size)
            if number is None:
                return False
            (request.number,) = kind.unpack(number)
        self._open, self._taken = None, 0
        return True

    def _take_strings(self, request: Request) -> bool:
        data, at, end = self._data, self._at, len(self._data)
        while request.lacking and end - at >= SIZE.size:
            start = at + SIZE.size
            stop = start + _bounded(SIZE.unpack_from(data, at)[0], LONGEST)
            if stop > end:
                break
            # A copy, because the buffer is cut and used again.
            request.strings.append(bytes(data[start:stop]))
            self._taken += stop - start + _EACH
            request.lacking -= 1
            at = stop
        self._at = at
        return not request.lacking

    def _take(self, size: int) -> bytes | None:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            self._at = start
            return None
        return bytes(self._data[start : self._at])


def _bounded(number: int, most: int) -> int:
    """Return the number. ValueError if it is larger than in any valid request."""
    if number > most:
        raise ValueError(f"a request with {number}; at most {most}")
    return number


class StoreConnection:
    """One client of a store. ``answer``: called with the bytes to send to the client."""

    def __init__(self, keys: StoreKeys, answer: Callable[[bytes], None]) -> None:
        self._keys = keys
        self._answer = answer
        self._requests = Requests()
        self._greeted = False
        self._wait: Wait | None = None
        self._held = 0  # bytes that are kept for this client

    def feed(self, piece: bytes) -> None:
        """Handle bytes from the client.

        ValueError or LookupError if it asks for the impossible: the caller then closes the connection.
        """
        try:
            for request in self._requests.feed(piece):
                if self._greeted:
                    self._do(request)
                elif (request.asked, request.number) != (Asked.VALIDATE, _MAGIC):
                    raise ValueError("no client of torch's store")
                self._greeted = True
        except UnknownRequestError as error:
            if self._greeted:  # else it may be a port scanner
                _tell_of_unknown(str(error))
            raise
        if not self._greeted and self._requests.unfinished > _GREETING:
            raise ValueError("no client of torch's store")
        # Half a request counts, too: else many clients that never finish one would fill the memory.
        self._hold(self._requests.unfinished)

    def _hold(self, size: int) -> None:
        if size != self._held:
            self._keys.hold(size - self._held)
            self._held = size

    def close(self) -> None:
        """Free the client's data. Call this when it is gone."""
        self._hold(0)
        self._give_up()

    def _give_up(self) -> None:
        if self._wait is not None:
            self._keys.give_up(self._wait)
            self._wait = None

    def _do(self, request: Request) -> None:
        if request.asked is Asked.WAIT:
            self._wait = self._keys.wait(request.strings, self._go)
        elif request.asked is Asked.MEET:
            self._wait = self._keys.meet(request.strings[0], request.number, self._go)
        elif request.asked is Asked.GIVE_UP:
            self._give_up()
            self._answer(GIVEN_UP)
        else:
            answer = _ANSWERS[request.asked](self._keys, request.strings, request.number)
            if answer:
                self._answer(answer)

    def _go(self) -> None:
        self._wait = None
        self._answer(GO)


@functools.lru_cache(1)  # once in a process: all ranks ask its store the same
def _tell_of_unknown(what: str) -> None:
    import importlib.metadata

    from mlaunch.base.log import log
    from mlaunch.torch_parts.lacking import TRIED

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # this process needs no torch, and some builds register none
        version = "of its ranks"
    log.warning(
        "the launch's store does not know a request (%s), and has refused it: torch %s makes requests that the "
        "releases mlaunch was tried with (%s) do not make; install one of these",
        what, version, TRIED,
    )  # fmt: skip


def _set(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    for key, value in zip(strings[::2], strings[1::2], strict=True):
        keys.set(key, value)
    return b""


def _append(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    keys.append(*strings)
    return b""


def _get(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    return b"".join([_string(keys.get(key)) for key in strings])


def _push(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    keys.push(*strings)
    return b""


def _pop(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    length, value = keys.pop(*strings)
    return NUMBER.pack(length) + (_string(value) if length else b"")


def _names(keys: StoreKeys, _: list[bytes], __: int) -> bytes:
    names = keys.names()
    return NUMBER.pack(len(names)) + b"".join(map(_string, names))


# The requests that are answered at once. b"": no answer.
_ANSWERS: dict[Asked, Callable[[StoreKeys, list[bytes], int], bytes]] = {
    Asked.PING: lambda _keys, _strings, number: SHORT.pack(number),
    Asked.SET: _set,
    Asked.MULTI_SET: _set,
    Asked.APPEND: _append,
    Asked.PUSH: _push,
    Asked.GET: _get,
    Asked.MULTI_GET: _get,
    Asked.POP: _pop,
    Asked.NAMES: _names,
    Asked.COMPARE_SET: lambda keys, strings, _: _string(keys.compare_set(*strings)),
    Asked.ADD: lambda keys, strings, number: NUMBER.pack(keys.add(strings[0], number)),
    Asked.CHECK: lambda keys, strings, _: _READY if keys.has(strings) else _NOT_READY,
    Asked.COUNT: lambda keys, _strings, _number: NUMBER.pack(keys.count()),
    Asked.DELETE: lambda keys, strings, _: NUMBER.pack(keys.delete(*strings)),
    Asked.LENGTH: lambda keys, strings, _: NUMBER.pack(keys.length(*strings)),
}


def _string(value: bytes) -> bytes:
    return SIZE.pack(len(value)) + value


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
    """A store for this user's processes on this machine, in a thread of its own until ``close``.

    It owns the listening socket, which is of IPv4.
    """

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
