"""How processes that were started together find the first of them; see ``joined``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

MARK = b"mlaunch-joined "
_TRIES = 5  # for a connection that is closed at once
_LONGEST, _LARGEST = 400, 1 << 20  # characters of a text, and the largest number, that one of them says


def without_delay(fd: int) -> socket.socket:
    """Returns the connection as one that sends each record at once, not with the next one or after 40 ms."""
    found = socket.socket(fileno=fd)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


@dataclass(frozen=True)
class Where:
    """Where one of them is found. ``number``: its own, -1 where nobody has told it."""

    name: str
    address: str
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
        texts, numbers = (said.name, said.address, said.secret), (said.port, said.number, said.size)
        short = all(isinstance(text, str) and text.isprintable() and len(text) <= _LONGEST for text in texts)
        if not (short and all(type(number) is int and -1 <= number <= _LARGEST for number in numbers)):
            raise ConnectionError("what came is no process of ours")
        return said

    def connect(self) -> socket.socket:
        """Returns a connection on which both sides have proved to know the secret. OSError if there can be none.

        Strangers who come in crowds may take its place before it has proved that; then it comes again.
        """
        for _ in range(_TRIES - 1):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                return self._connect()
        return self._connect()

    def _connect(self) -> socket.socket:
        who = f"{self.name} at {self.address}, port {self.port},"
        try:
            with Client((self.address, self.port), authkey=self.secret.encode()) as connection:
                return without_delay(os.dup(connection.fileno()))
        except AuthenticationError as error:
            raise ConnectionError(f"{who} is somebody else") from error
        except EOFError as error:
            raise ConnectionResetError(f"{who} hangs up") from error


@dataclass(frozen=True)
class Lead:
    """Tells the first one of all, by their places in the order of machines."""

    name: str
    all: Mapping[int, Where]
