"""The places of zygotes: sockets in the user's runtime directory, each named after the facts of its import.

A name is made and removed under a lock on the directory, which needs no file of its own and ends with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlaunch.base.peer_process import is_this_user
from mlaunch.protocol import registry

VARIABLE = "MLAUNCH_WARM"  # "0": use none; a time: leave one, which stays so long after its last use
_SUFFIX = ".warm"
_BACKLOG = 4096  # callers that wait; the kernel has a limit of its own (somaxconn)
_RETRY = 0.05  # seconds between attempts to lock


def names(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yield directory and key of each possible zygote."""
    for directory in registry.candidates(environ):
        found: list[str] = []
        # Its owner is checked before it is listed: a stranger's in /tmp may have any number of names, or be a link.
        with contextlib.suppress(OSError), registry.opened(directory) as place:
            found = sorted(name for name in os.listdir(place) if name.endswith(_SUFFIX))
        for name in found:
            yield directory, name.removesuffix(_SUFFIX)


def connect(directory: Path, key: str) -> socket.socket | None:
    """Return a socket that is connected to this user's zygote; None: there is none, or its queue is full.

    Remove the name of one that was killed.
    """
    is_gone = False
    with contextlib.suppress(OSError), registry.opened(directory) as place:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)  # not to wait for a full queue
            connection.connect(f"{place}/{key}{_SUFFIX}")
            connection.setblocking(True)
            if is_this_user(connection):
                return connection
        except ConnectionRefusedError:
            is_gone = True
        except OSError:
            pass
        connection.close()
    if is_gone:
        _remove_dead(directory, key)
    return None


@contextlib.contextmanager
def locked(directory: Path, patience: float = 0.0) -> Iterator[int]:
    """Yield a lock on the directory, which duplicates of its descriptor hold, too.

    BlockingIOError: another process has had it for ``patience`` seconds.
    """
    end = time.monotonic() + patience
    with registry.opened_fd(directory) as fd:
        while not _lock(fd, last=time.monotonic() >= end):
            time.sleep(_RETRY)
        yield fd


def _lock(fd: int, *, last: bool) -> bool:
    try:
        # flock belongs to the descriptor: the starter passes it to the zygote, which keeps the lock alone.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last:
            raise
        return False
    return True


def listen(directory: Path, key: str) -> tuple[socket.socket, int]:
    """Return a listening socket and the inode of its name. Called under the lock. OSError if it cannot be made."""
    with registry.opened(directory) as place:
        path = f"{place}/{key}{_SUFFIX}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of one that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(path)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener, os.lstat(path).st_ino


def is_there(directory: Path, key: str, inode: int) -> bool:
    """True if the name is still this socket's."""
    with contextlib.suppress(OSError):
        return os.lstat(directory / f"{key}{_SUFFIX}").st_ino == inode
    return False


def remove(directory: Path, key: str, inode: int) -> None:
    """Remove the name of a zygote that ends; but not during another one's start, which does it.

    ``inode``: the zygote's socket; the name of another one stays.
    """
    name = f"{key}{_SUFFIX}"
    with contextlib.suppress(OSError), locked(directory) as place:
        status = os.lstat(name, dir_fd=place)
        if stat.S_ISSOCK(status.st_mode) and inode == status.st_ino:
            os.unlink(name, dir_fd=place)


def _remove_dead(directory: Path, key: str) -> None:
    """Remove the name of a dead zygote; under the lock, as another one may have it by now."""
    name = f"{key}{_SUFFIX}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, contextlib.suppress(OSError), locked(directory) as place:
        ours.setblocking(False)
        try:
            ours.connect(f"/proc/self/fd/{place}/{name}")
        except ConnectionRefusedError:
            os.unlink(name, dir_fd=place)
