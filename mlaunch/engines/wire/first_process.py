"""How processes that were started together find the first of them; see ``joined``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

MARK = b"mlaunch-joined "
_CONNECT_TIMEOUT = 5.0  # seconds for an address to answer: one of another network may be silent
_PROOF_TIMEOUT = 30  # seconds for who is there to prove itself
_MOST_ADDRESSES = 256
_TRIES = 5  # for a connection that is closed at once
_LONGEST, _LARGEST = 400, 1 << 20  # characters of a text, and the largest number, that one of them says


def limit_reads(fd: int, seconds: int) -> None:
    """Makes a read of the connection fail after so many seconds; 0: never."""
    with socket.socket(fileno=os.dup(fd)) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def without_delay(fd: int) -> socket.socket:
    """Returns the connection as one that sends each record at once, not with the next one or after 40 ms."""
    found = socket.socket(fileno=fd)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


@dataclass(frozen=True)
class Where:
    """Where one of them is found. ``number``: its own, -1 where nobody has told it."""

    name: str
    addresses: tuple[str, ...]
    port: int
    number: int
    size: int
    secret: str = field(repr=False)

    @classmethod
    def of_line(cls, line: bytes) -> Where:
        """Reads what one of them has printed. ConnectionError for what none prints."""
        try:
            said = cls(**json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConnectionError("what came is no process of ours") from error
        if not isinstance(said.addresses, list) or not 1 <= len(said.addresses) <= _MOST_ADDRESSES:
            raise ConnectionError("what came is no process of ours")
        texts, numbers = (said.name, said.secret, *said.addresses), (said.port, said.number, said.size)
        short = all(isinstance(text, str) and text.isprintable() and len(text) <= _LONGEST for text in texts)
        if not (short and all(type(number) is int and -1 <= number <= _LARGEST for number in numbers)):
            raise ConnectionError("what came is no process of ours")
        return replace(said, addresses=tuple(said.addresses))

    def connect(self) -> socket.socket:
        """Returns a connection on which both sides have proved to know the secret. OSError if there can be none."""
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
        """Strangers who come in crowds may take its place before it has proved itself; then it comes again."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, EOFError):
                return self._prove(address)
        return self._prove(address)

    def _prove(self, address: str) -> socket.socket:
        end = socket.create_connection((address, self.port), timeout=_CONNECT_TIMEOUT)
        end.settimeout(None)
        with Connection(end.detach()) as connection:
            limit_reads(connection.fileno(), _PROOF_TIMEOUT)
            # multiprocessing's own handshake, HMAC of a challenge on both sides: the secret does not travel.
            answer_challenge(connection, self.secret.encode())
            deliver_challenge(connection, self.secret.encode())
            limit_reads(connection.fileno(), 0)
            return without_delay(os.dup(connection.fileno()))


@dataclass(frozen=True)
class Lead:
    """Tells the first one of all, by their places in the order of machines."""

    name: str
    all: Mapping[int, Where]
