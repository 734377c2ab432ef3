"""At which of its addresses the first machine of a launch is found by the others: each of them tries all.

A machine may have several, of which some lead nowhere from elsewhere: a bridge for containers, a network for storage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Sequence

from mlaunch.base.exceptions import LaunchError
from mlaunch.engines.launch.machines import Machines
from mlaunch.protocol.messages.member_messages import Listen, Reach

_PATIENCE = 5.0  # seconds for an address to answer
_ANSWER_TIMEOUT = 60.0  # seconds for machines to tell, some of which may be busy


def address_for_all(placed: Machines, port: int) -> str:
    """Returns the first one that all others have reached at that port, where the first machine listens meanwhile.

    Raises:
        LaunchError: There is none.
    """
    if not placed.meets_at:
        placed.meets_at = _tried(placed, port)
    return placed.meets_at


def _tried(placed: Machines, port: int) -> str:
    first, *others = placed.machines
    offered = first.given.addresses
    if not placed.ask([first], Listen(port), _ANSWER_TIMEOUT)[0].listens:  # as its agent will say, too
        return offered[0]
    told = [one.failures for one in placed.ask(others, Reach(offered, port), _ANSWER_TIMEOUT)]
    placed.ask([first], Listen(None), _ANSWER_TIMEOUT)
    for address, *failures in zip(offered, *told, strict=True):
        if not any(failures):
            return str(address)
    cut = max(range(len(others)), key=lambda number: sum(map(bool, told[number])))
    tried = ", ".join(f"{address} ({words})" for address, words in zip(offered, told[cut], strict=True) if words)
    raise LaunchError(
        f"host {others[cut].host} does not reach host {first.host} at port {port}: tried {tried}; does a firewall "
        f"stand between them? Open the port, choose one that is open (port=), or say where others find the first "
        f"machine (master_ip=)"
    )


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
