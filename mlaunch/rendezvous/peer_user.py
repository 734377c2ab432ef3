"""The user at the other end of a connection on loopback, where any user of the machine can connect.

The kernel knows the owner of each socket. It answers by netlink (sock_diag), for one connection in 13 µs, or in
``/proc/net/tcp``, for all at once in milliseconds. It shows a socket that its process has closed as root's, though it
belongs to nobody. So the answer counts only while both ends are open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from mlaunch.base.peer_process import stands_for_strangers

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
_HEAD = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states: struct inet_diag_req_v2
_PORTS = struct.Struct("!HH")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface, and a cookie: any
_STATE, _OWNER = _HEAD.size + 1, _HEAD.size + 64  # where the answer has the state; the user, and the file's number
_OWNER_FORM = struct.Struct("=II")
_TCP_INFO = 11  # linux/tcp.h; its first byte is the state
_ESTABLISHED = 1
_TABLES = "/proc/net/tcp", "/proc/net/tcp6"  # a client of IPv6 may reach an address of IPv4

Address = tuple[str, int]
Owner = tuple[int, int]  # the user, and the number of the file


class PeerUser:
    """A check of IPv4 connections within this machine: is the other end a process of this user?"""

    def __init__(self) -> None:
        self._user = os.geteuid()
        self._has_own_number = not stands_for_strangers(self._user)
        self._asked = 0
        self._kernel: socket.socket | None = None
        with contextlib.suppress(OSError):  # a sandbox may have no netlink; or no descriptor is left
            self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()

    def is_ours(self, end: socket.socket) -> bool:
        """True if a process of this user has the other end, now and ever since it was connected.

        If neither netlink nor ``/proc/net`` is there, everybody counts as this user.
        """
        try:
            theirs, ours = end.getpeername(), end.getsockname()
            owner = self._ask(theirs, ours)
            if owner is None and _is_open(end):  # an end that is closed is not worth the milliseconds
                owner = _look_up(theirs, ours)
            if owner is None or owner[0] != self._user or not (self._has_own_number or _is_shown(owner[1])):
                return False
            return _is_open(end)  # else another connection may have these ports now
        except (FileNotFoundError, PermissionError):
            return self._kernel is None
        except OSError:
            return False

    def _ask(self, theirs: Address, ours: Address) -> Owner | None:
        """Ask the kernel by netlink for the owner of an open socket; None if it finds none, or does not answer."""
        if self._kernel is None:
            return None
        self._asked += 1
        ends = _PORTS.pack(theirs[1], ours[1]) + b"".join(_packed(host).ljust(16, b"\0") for host, _ in (theirs, ours))
        # Only established connections: one that is being closed has no owner any more.
        query = _QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED) + ends + _ANY
        head = _HEAD.pack(_HEAD.size + len(query), _BY_FAMILY, _REQUEST, self._asked, 0)
        try:
            self._kernel.send(head + query)
            answer = self._kernel.recv(4096, socket.MSG_DONTWAIT)
        except OSError:
            return None
        _, kind, _, number, _ = _HEAD.unpack_from(answer)
        # A late answer to an earlier question would be about another connection.
        if (kind, number) != (_BY_FAMILY, self._asked):
            return None
        user, file = _OWNER_FORM.unpack_from(answer, _OWNER)
        return (user, file) if answer[_STATE] == _ESTABLISHED and file else None


def _packed(host: str) -> bytes:
    return socket.inet_aton(host)


def _is_open(end: socket.socket) -> bool:
    return end.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == _ESTABLISHED


def _is_shown(file: int) -> bool:
    """True if this process may see which process has the socket with this number: then it is no stranger's.

    For a user namespace that does not map all users: there, strangers appear under this user's number.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if any(_target(f"/proc/{pid}/fd/{fd}") == f"socket:[{file}]" for fd in os.listdir(f"/proc/{pid}/fd")):
                return True
    return False


def _target(path: str) -> str:
    with contextlib.suppress(OSError):  # it was closed just now
        return os.readlink(path)
    return ""


def _look_up(theirs: Address, ours: Address) -> Owner | None:
    """Return the owner of an open socket from the kernel's tables; None if they have none. OSError: no tables."""
    wanted = [[_shown(end, prefix) for end in (theirs, ours)] for prefix in (b"", b"\0" * 10 + b"\xff\xff")]
    for row in _rows():
        if row[1:3] in wanted:
            return (int(row[7]), int(row[9])) if int(row[3], 16) == _ESTABLISHED and int(row[9]) else None
    return None


def _rows() -> Iterator[list[str]]:
    for path in _TABLES:
        try:
            text = Path(path).read_text(encoding="ascii")
        except FileNotFoundError:
            if path == _TABLES[0]:
                raise
            continue  # a kernel without IPv6
        yield from (line.split() for line in text.splitlines()[1:])


def _shown(end: Address, prefix: bytes) -> str:
    """Return an end in the form of the tables: each word of the address as a number in this machine's byte order."""
    address = prefix + _packed(end[0])
    words = struct.unpack(f"={len(address) // 4}I", address)
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"
