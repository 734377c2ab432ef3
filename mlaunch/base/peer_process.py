"""The process at the other end of a connected socket of the Unix family, which the kernel noted as they met."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping

from mlaunch.base.confinement import Confinement, confinement, read, rights_lacking

_FORM = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PEER_PIDFD = 77  # SO_PEERPIDFD, Linux 6.5
_ALL_NUMBERS = (1 << 32) - 1


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process that connected, or that listened; pid 0: of another namespace."""
    pid, user, _ = _FORM.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return pid, user


def is_this_user(connection: socket.socket) -> bool:
    """True if that process belongs to the user of this one."""
    if peer_process(connection)[1] != os.geteuid():
        return False
    return not stands_for_strangers(os.geteuid()) or _is_shown(connection)


def peer_confinement(connection: socket.socket) -> Confinement:
    """Return what that process is confined to. OSError: it has ended, or the kernel does not show it to this one."""
    pidfd = pidfd_of_peer(connection)
    try:
        number = _number(pidfd)
        found = confinement(number)
        # Of no other process: the number has been this one's all the time.
        if _number(pidfd) != number:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return found
    finally:
        os.close(pidfd)


def differences_to_peer(connection: socket.socket, ours: Mapping[str, str]) -> str:
    """Return in words what that process is confined to otherwise than this one; "": they are alike.

    ``ours``: what this one is confined to, and maybe more.
    """
    try:
        theirs = peer_confinement(connection)
    except OSError as error:
        return f"process {peer_process(connection)[0]} is not shown to process {os.getpid()} ({error.strerror})"
    found = sorted(name for name, value in theirs.items() if ours.get(name) != value)
    return f"these differ: {', '.join(found)}" if found else ""


def rights_lacking_to_peer(connection: socket.socket) -> str:
    """Return in words what keeps that process from what is open to this one; "": nothing does."""
    try:
        return rights_lacking(peer_confinement(connection), confinement())
    except OSError as error:
        return f"it is not shown to process {os.getpid()} ({error.strerror})"


def stands_for_strangers(user: int) -> bool:
    """True if, in this user namespace, each user without a number of its own is shown under this one."""
    try:
        if user != int(read("/proc/sys/kernel/overflowuid")):
            return False
        rows = read("/proc/self/uid_map").splitlines()
    except OSError:
        return False
    return sum(int(row.split()[2]) for row in rows) < _ALL_NUMBERS


def pidfd_of_peer(connection: socket.socket) -> int:
    """Return a pidfd of that process. OSError: it has ended, or is of another namespace."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError:  # an older kernel; pid 0 is refused here
        return os.pidfd_open(peer_process(connection)[0])


def _number(pidfd: int) -> int:
    """Return the process's number in /proc, which may be of another namespace than ours. OSError: it has none."""
    for line in read(f"/proc/self/fdinfo/{pidfd}").splitlines():
        if line.startswith("Pid:") and int(line.split()[1]) > 0:
            return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


def _is_shown(connection: socket.socket) -> bool:
    # The kernel shows it only to a process that may do what it may, so it is no stranger's.
    try:
        peer_confinement(connection)
    except OSError:
        return False
    return True
