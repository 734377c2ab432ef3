"""A machine's part in finding the address at which the others reach the first machine: it listens, or tries them all.

Who asks is ``mlaunch/engines/caller/launch/meeting_address.py``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Sequence

_PATIENCE = 5.0  # seconds for an address to answer


def listen_for_others(port: int | None) -> socket.socket | None:
    """Returns what listens on all addresses; None if the port is taken. The kernel answers who comes."""
    try:
        return None if port is None else socket.create_server(("", port))
    except OSError:
        return None


def failures_at(addresses: Sequence[str], port: int) -> tuple[str, ...]:
    """Tries all at once; says for each why nobody answers there, "" if somebody does."""
    ends = [socket.socket() for _ in addresses]
    try:
        numbers = [_begin(end, address, port) for end, address in zip(ends, addresses, strict=True)]
        _wait([end for end, number in zip(ends, numbers, strict=True) if number == errno.EINPROGRESS])
        return tuple(_failure_of(end, number) for end, number in zip(ends, numbers, strict=True))
    except OSError as error:  # a name that does not resolve
        return (f"{error.strerror or error}",) * len(ends)
    finally:
        for end in ends:
            end.close()


def _begin(end: socket.socket, address: str, port: int) -> int:
    # All at once: an address of another network may be silent, for minutes.
    end.setblocking(False)
    return end.connect_ex((address, port))


def _wait(ends: Sequence[socket.socket]) -> None:
    """Waits until all have an answer, or for a while."""
    waiting, until = {end.fileno() for end in ends}, time.monotonic() + _PATIENCE
    while waiting and (left := until - time.monotonic()) > 0:
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLOUT)
        waiting -= {fd for fd, _ in poll.poll(1000 * left)}


def _failure_of(end: socket.socket, number: int) -> str:
    if number == errno.EINPROGRESS:
        number = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number == 0:
        with contextlib.suppress(OSError):
            end.getpeername()
            return ""
        number = errno.ETIMEDOUT
    return os.strerror(number)
