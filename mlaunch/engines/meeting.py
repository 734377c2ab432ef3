"""How processes that were started together find the first of them; see ``joined``."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

MARK = b"mlaunch-joined "


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

    def connect(self) -> socket.socket:
        """Returns a connection on which both sides have proved to know the secret. OSError if there can be none."""
        try:
            with Client((self.address, self.port), authkey=self.secret.encode()) as connection:
                return without_delay(os.dup(connection.fileno()))
        except AuthenticationError as error:
            raise ConnectionError(f"{self.name} at {self.address}, port {self.port}, is somebody else") from error


@dataclass(frozen=True)
class Lead:
    """Tells the first one of all, by their places in the order of machines."""

    name: str
    all: Mapping[int, Where]
