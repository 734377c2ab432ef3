"""The process at the other end of a connected Unix socket, as the kernel noted it when they connected."""

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
    """Return the pid and the user of the process that connected, or listened; pid 0: it is in another namespace."""
    pid, user, _ = _FORM.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return pid, user


def is_this_user(connection: socket.socket) -> bool:
    """True if that process belongs to the user of this one."""
    if peer_process(connection)[1] != os.geteuid():
        return False
    return not stands_for_strangers(os.geteuid()) or _is_shown(connection)


def peer_confinement(connection: socket.socket) -> Confinement:
    """Return that process's confinement. OSError: it has ended, or the kernel does not show it to this one."""
    pidfd = pidfd_of_peer(connection)
    try:
        number = _number(pidfd)
        found = confinement(number)
        # The number was this process's all the time.
        if _number(pidfd) != number:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return found
    finally:
        os.close(pidfd)


def differences_to_peer(connection: socket.socket, ours: Mapping[str, str]) -> str:
    """Return in words how that process's confinement differs from this one's; "": it does not.

    ``ours``: this process's confinement, or more.
    """
    try:
        theirs = peer_confinement(connection)
    except OSError as error:
        return f"process {peer_process(connection)[0]} is not shown to process {os.getpid()} ({error.strerror})"
    found = sorted(name for name, value in theirs.items() if ours.get(name) != value)
    return f"these differ: {', '.join(found)}" if found else ""


def rights_lacking_to_peer(connection: socket.socket) -> str:
    """Return in words the rights of this process that that one lacks; "": it has them all."""
    try:
        return rights_lacking(peer_confinement(connection), confinement())
    except OSError as error:
        return f"it is not shown to process {os.getpid()} ({error.strerror})"


def stands_for_strangers(user: int) -> bool:
    """True if users without a number in this user namespace are shown under this one."""
    try:
        if user != int(read("/proc/sys/kernel/overflowuid")):
            return False
        rows = read("/proc/self/uid_map").splitlines()
    except OSError:
        return False
    return sum(int(row.split()[2]) for row in rows) < _ALL_NUMBERS


def pidfd_of_peer(connection: socket.socket) -> int:
    """Return a pidfd of that process. OSError: it has ended, or is in another namespace."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError:  # an older kernel; pid 0 is refused here
        return os.pidfd_open(peer_process(connection)[0])


def _number(pidfd: int) -> int:
    """Return the process's number in /proc, which may be of another namespace. OSError: it has none."""
    for line in read(f"/proc/self/fdinfo/{pidfd}").splitlines():
        if line.startswith("Pid:") and int(line.split()[1]) > 0:
            return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


def _is_shown(connection: socket.socket) -> bool:
    # The kernel shows it only to a process with all its rights, so it is no stranger's.
    try:
        peer_confinement(connection)
    except OSError:
        return False
    return True
