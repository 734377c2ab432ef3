"""The first of the processes that one program has started: how the others are found, and how it carries their streams.

For engines that give a stream only to one of their machines, as ``mpirun`` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeAlias

from mlaunch.engines.wire.frame_stream import FrameStream

MARK = b"mlaunch-joined "
_CONNECT_TIMEOUT = 5.0  # seconds for an address to answer: one of another network may be silent
_PROOF_TIMEOUT = 30  # seconds for the other side to prove that it knows the secret
_MOST_ADDRESSES = 256
_TRIES = 5  # attempts if a connection is closed at once
_LONGEST, _LARGEST = 400, 1 << 20  # characters of a text, and the largest number, that a process may print
_READ = 1 << 18  # bytes
_LAST_WORDS_TIMEOUT = 10.0  # seconds to wait after all streams here have ended
_FULL = 1 << 22  # bytes that wait to be written, above which nothing more is read


def limit_reads(fd: int, seconds: int) -> None:
    """Make reads of the connection fail after this many seconds; 0: never."""
    with socket.socket(fileno=os.dup(fd)) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def without_delay(fd: int) -> socket.socket:
    """Return a socket for the connection that sends each record at once, not with the next one or after 40 ms."""
    found = socket.socket(fileno=fd)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


@dataclass(frozen=True)
class ProcessAddress:
    """The address of a process that a program has started. ``number``: its place among all; -1 if not known."""

    name: str
    addresses: tuple[str, ...]
    port: int
    number: int
    size: int
    secret: str = field(repr=False)

    @classmethod
    def of_line(cls, line: bytes) -> ProcessAddress:
        """Read the line that a process has printed. ConnectionError if no such process printed it."""
        try:
            said = cls(**json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConnectionError("what came is no process of mlaunch") from error
        if not isinstance(said.addresses, list) or not 1 <= len(said.addresses) <= _MOST_ADDRESSES:
            raise ConnectionError("what came is no process of mlaunch")
        texts, numbers = (said.name, said.secret, *said.addresses), (said.port, said.number, said.size)
        short = all(isinstance(text, str) and text.isprintable() and len(text) <= _LONGEST for text in texts)
        if not (short and all(type(number) is int and -1 <= number <= _LARGEST for number in numbers)):
            raise ConnectionError("what came is no process of mlaunch")
        return replace(said, addresses=tuple(said.addresses))

    def connect(self) -> socket.socket:
        """Return a connection on which both sides have proved that they know the secret; OSError if that fails."""
        tried = []
        for address in self.addresses:
            try:
                return self._connect_at(address)
            except AuthenticationError:
                tried.append(f"{address} (somebody else is there)")
            except (OSError, EOFError) as error:
                tried.append(f"{address} ({getattr(error, 'strerror', '') or error or 'it hangs up'})")
        raise ConnectionError(f"{self.name} is not reached at port {self.port}: tried {', '.join(tried)}")

    def _connect_at(self, address: str) -> socket.socket:
        """Connect at one address. Tries again if it is closed at once: many strangers at a time may take its place."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, EOFError):
                return self._prove(address)
        return self._prove(address)

    def _prove(self, address: str) -> socket.socket:
        end = socket.create_connection((address, self.port), timeout=_CONNECT_TIMEOUT)
        end.settimeout(None)
        with Connection(end.detach()) as connection:
            limit_reads(connection.fileno(), _PROOF_TIMEOUT)
            # multiprocessing's own handshake, HMAC of a challenge on both sides: the secret itself is not sent.
            answer_challenge(connection, self.secret.encode())
            deliver_challenge(connection, self.secret.encode())
            limit_reads(connection.fileno(), 0)
            return without_delay(os.dup(connection.fileno()))


@dataclass(frozen=True)
class Lead:
    """The caller's order to the first process to carry for all, with their places in the order of machines."""

    name: str
    all: Mapping[int, ProcessAddress]


@dataclass(frozen=True)
class Carried:
    """Data of one of the streams; b"": that stream has ended."""

    number: int
    data: bytes


# The caller's end, and that of the first of the processes, which carries the streams of all.
CarriedStream: TypeAlias = FrameStream[Carried, Lead | Carried]
CarriersStream: TypeAlias = FrameStream[Lead | Carried, Carried]


@dataclass
class _End:
    socket: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    finished: bool = False  # the other side has ended its stream
    reads: bool = True  # this side may still send something


class Mux:
    """A multiplexer: several numbered sockets, which it owns, over one stream. Both sides run the same code.

    A socket whose peer does not read blocks all the others, once some megabytes wait.
    """

    def __init__(self, stream: FrameStream[Lead | Carried, Carried], ends: Mapping[int, socket.socket]) -> None:
        self._stream = stream
        self._ends = {number: _End(end) for number, end in ends.items()}
        for end in ends.values():
            end.setblocking(False)

    def run(self) -> None:
        """Carry data until the one stream ends, or all sockets have ended on both sides."""
        try:
            self._hear()  # what came with the order to begin
            while any(end.reads or not end.finished for end in self._ends.values()) and self._step():
                pass
        except EOFError:
            pass
        finally:
            self._stream.flush()
            for end in self._ends.values():
                end.socket.close()

    def _step(self) -> bool:
        """Wait for the next data, and carry it. Return False if no socket is left here and nothing comes."""
        ready = self._wait()
        for number, end in self._ends.items():
            fd = end.socket.fileno()
            if ready.get(fd, 0) & ~select.POLLOUT:
                self._read(number, end)
            self._write(end)
        if self._stream.outgoing in ready:
            self._stream.flush()
        if self._stream.incoming in ready:
            self._hear()
        return bool(ready)

    def _hear(self) -> None:
        for record, _ in self._stream.receive():
            if isinstance(record, Carried):
                self._take(self._ends[record.number], record.data)

    def _wait(self) -> dict[int, int]:
        poll = select.poll()
        if all(len(end.waiting) < _FULL for end in self._ends.values()):
            poll.register(self._stream.incoming, select.POLLIN)
        if self._stream.unsent:
            poll.register(self._stream.outgoing, select.POLLOUT)
        for end in self._ends.values():
            reads = end.reads and self._stream.unsent < _FULL
            wanted = (select.POLLIN if reads else 0) | (select.POLLOUT if end.waiting else 0)
            if wanted:
                poll.register(end.socket, wanted)
        return dict(poll.poll(None if any(end.reads for end in self._ends.values()) else 1000 * _LAST_WORDS_TIMEOUT))

    def _read(self, number: int, end: _End) -> None:
        try:
            data = end.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if end.reads:
            self._stream.send(Carried(number, data))
        end.reads = end.reads and bool(data)

    def _take(self, end: _End, data: bytes) -> None:
        end.waiting += data
        end.finished = end.finished or not data
        self._write(end)
        if end.finished and not end.waiting:
            with contextlib.suppress(OSError):
                end.socket.shutdown(socket.SHUT_WR)

    def _write(self, end: _End) -> None:
        try:
            while end.waiting:
                del end.waiting[: end.socket.send(end.waiting)]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more
            end.waiting.clear()
        else:
            if end.finished:
                with contextlib.suppress(OSError):
                    end.socket.shutdown(socket.SHUT_WR)
