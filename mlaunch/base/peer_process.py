"""The process at the other end of a connected Unix socket, and how the kernel confines a process.

The kernel notes who connects. A confinement is namespaces, root directory, credentials, and rights that were given up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Mapping

Confinement = dict[str, str]  # by the words that a person is shown

_SETS = ("Gid", "Groups")  # rows of /proc/PID/status: numbers that give rights
_CAPABILITIES = ("CapPrm", "CapEff", "CapBnd")
_FILTERS = ("NoNewPrivs", "Seccomp", "Seccomp_filters")
_ROWS = (
    "Uid", *_SETS, "CapInh", *_CAPABILITIES, "CapAmb", *_FILTERS, "Cpus_allowed_list", "Mems_allowed_list"
)  # fmt: skip
# The accounts that its work is counted for, which give no rights.
_ACCOUNTS = {"cgroup": "cgroup", "login": "loginuid", "login session": "sessionid"}
_MOST = 65_536
_FEWER = "it has fewer rights"
_FORM = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PEER_PIDFD = 77  # SO_PEERPIDFD, Linux 6.5
_ALL_NUMBERS = (1 << 32) - 1


def confinement(process: int | str = "self") -> Confinement:
    """Return the confinement of a process, from /proc.

    Raises:
        OSError: There is no such process, or the kernel does not show it: it has another user's rights, more rights
            than this one, or is outside of the Landlock domain that this one is in.
    """
    place = f"/proc/{process}"
    root = os.stat(f"{place}/root")
    namespaces = {f"namespace {name}": os.readlink(f"{place}/ns/{name}") for name in sorted(os.listdir(f"{place}/ns"))}
    rows = (line.partition(":") for line in read_proc(f"{place}/status").splitlines())
    return {
        "root directory": f"({root.st_dev}:{root.st_ino})",
        "security label": _text(f"{place}/attr/current"),
        **namespaces,
        **{f"status {name}": value.strip() for name, _, value in rows if name in _ROWS},
        **{name: _text(f"{place}/{file}") for name, file in _ACCOUNTS.items()},
    }


def read_proc(path: str) -> str:
    """Return the content of a file of /proc, up to 64 KiB. OSError: there is none, or it is not shown."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # not by Path, which takes five times as long
    try:
        return os.read(fd, _MOST).decode("utf-8", "replace")
    finally:
        os.close(fd)


def is_filtered(found: Mapping[str, str]) -> bool:
    """True if it has no_new_privs or a seccomp filter, so it may be in a sandbox that /proc does not show."""
    return any(found.get(f"status {name}", "0") != "0" for name in _FILTERS)


def rights_lacking(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return what a process may not do that this one may, in words; "" if it has all the rights that this one has."""
    for name, value in ours.items():
        is_place = name.startswith("namespace") or name in {"root directory", "security label", "status Uid"}
        if is_place and theirs.get(name) != value:
            return f"its {name.removeprefix('status ')} differs"
    if not _numbers(ours) <= _numbers(theirs):
        return f"{_FEWER}: it lacks a group"
    for name in _CAPABILITIES:
        if _hexadecimal(ours, name) & ~_hexadecimal(theirs, name):
            return f"{_FEWER}: it lacks a capability ({name})"
    for name in _FILTERS:
        if int(theirs.get(f"status {name}", "0")) > int(ours.get(f"status {name}", "0")):
            return f"{_FEWER}: {name} is set"
    return ""


def _numbers(found: Mapping[str, str]) -> set[str]:
    return {number for name in _SETS for number in found.get(f"status {name}", "").split()}


def _hexadecimal(found: Mapping[str, str], name: str) -> int:
    return int(found.get(f"status {name}", "0"), 16)


def _text(path: str) -> str:
    """Return the file's content; "" where this kernel has no such file, or does not show it."""
    with contextlib.suppress(OSError):
        return read_proc(path).strip(" \n\0")
    return ""


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process that connected, or listened; pid 0: it is in another namespace."""
    pid, user, _ = _FORM.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return pid, user


def is_this_user(connection: socket.socket) -> bool:
    """True if the peer runs as the user of this process."""
    if peer_process(connection)[1] != os.geteuid():
        return False
    return not stands_for_strangers(os.geteuid()) or _is_shown(connection)


def peer_confinement(connection: socket.socket) -> Confinement:
    """Return the peer's confinement. OSError: it has ended, or the kernel does not show it to this one."""
    pidfd = pidfd_of_peer(connection)
    try:
        number = _pid_in_proc(pidfd)
        found = confinement(number)
        # The number was the peer's all the time.
        if _pid_in_proc(pidfd) != number:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return found
    finally:
        os.close(pidfd)


def differences_to_peer(connection: socket.socket, ours: Mapping[str, str]) -> str:
    """Return in words how the peer's confinement differs from this process's; "": it does not.

    ``ours``: this process's confinement, or more.
    """
    try:
        theirs = peer_confinement(connection)
    except OSError as error:
        return f"process {peer_process(connection)[0]} is not shown to process {os.getpid()} ({error.strerror})"
    found = sorted(name for name, value in theirs.items() if ours.get(name) != value)
    return f"these differ: {', '.join(found)}" if found else ""


def rights_lacking_to_peer(connection: socket.socket) -> str:
    """Return in words which rights of this process the peer lacks; "": none."""
    try:
        return rights_lacking(peer_confinement(connection), confinement())
    except OSError as error:
        return f"it is not shown to process {os.getpid()} ({error.strerror})"


def stands_for_strangers(user: int) -> bool:
    """True if users without a number in this user namespace are shown under this one."""
    try:
        if user != int(read_proc("/proc/sys/kernel/overflowuid")):
            return False
        rows = read_proc("/proc/self/uid_map").splitlines()
    except OSError:
        return False
    return sum(int(row.split()[2]) for row in rows) < _ALL_NUMBERS


def pidfd_of_peer(connection: socket.socket) -> int:
    """Return a pidfd of the peer. OSError: it has ended, or is in another namespace."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError:  # an older kernel; pid 0 is refused here
        return os.pidfd_open(peer_process(connection)[0])


def _pid_in_proc(pidfd: int) -> int:
    """Return the process's number in /proc, which may be of another namespace. OSError: it has none."""
    for line in read_proc(f"/proc/self/fdinfo/{pidfd}").splitlines():
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
