"""Where zygotes are found: sockets in the user's runtime directory, each named after what counted at its import.

Whoever makes or removes a name holds a lock on the directory, which needs no file of its own and ends with its holder.
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

VARIABLE = "MLAUNCH_WARM"  # "0": none is used; a time: one is left, which stays so long after its last use
_SUFFIX = ".warm"
_BACKLOG = 4096  # callers that wait; the kernel has a limit of its own (somaxconn)
_LOOK = 0.05  # seconds between looks whether a lock is free


def names(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yields directory and key of each zygote that there may be."""
    for directory in registry.candidates(environ):
        found: list[str] = []
        # Not listed before it is known whose it is: a stranger's in /tmp may have any number of names, or be a link.
        with contextlib.suppress(OSError), registry.opened(directory) as place:
            found = sorted(name for name in os.listdir(place) if name.endswith(_SUFFIX))
        for name in found:
            yield directory, name.removesuffix(_SUFFIX)


def connect(directory: Path, key: str) -> socket.socket | None:
    """Returns a socket that is connected to this zygote, of this user; None: there is none, or its queue is full.

    The name of one that was killed is removed.
    """
    is_gone = False
    with contextlib.suppress(OSError), registry.opened(directory) as place:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)  # of a full queue nobody waits for an end
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
    """Gives a lock on the directory, which its descriptor's duplicates hold as well.

    BlockingIOError: another process has it, and had it for ``patience`` seconds.
    """
    end = time.monotonic() + patience
    with registry.opened_fd(directory) as fd:
        while not _lock(fd, last=time.monotonic() >= end):
            time.sleep(_LOOK)
        yield fd


def _lock(fd: int, *, last: bool) -> bool:
    try:
        # By descriptor, not by process: the starter hands it to the zygote, which keeps the lock when the starter is
        # gone.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last:
            raise
        return False
    return True


def listen(directory: Path, key: str) -> tuple[socket.socket, int]:
    """Returns a listening socket and the inode of its name; under the lock. OSError if there can be none."""
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
    """Tells whether the name still stands for this socket."""
    with contextlib.suppress(OSError):
        return os.lstat(directory / f"{key}{_SUFFIX}").st_ino == inode
    return False


def remove(directory: Path, key: str, inode: int) -> None:
    """Remove the name of a zygote that is no more; not while another one is being started, who sees to it.

    ``inode``: of the socket that it must stand for.
    """
    name = f"{key}{_SUFFIX}"
    with contextlib.suppress(OSError), locked(directory) as place:
        status = os.lstat(name, dir_fd=place)
        if stat.S_ISSOCK(status.st_mode) and inode == status.st_ino:
            os.unlink(name, dir_fd=place)


def _remove_dead(directory: Path, key: str) -> None:
    """Remove a name at which nobody listens: under the lock, as another may have been given it since."""
    name = f"{key}{_SUFFIX}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, contextlib.suppress(OSError), locked(directory) as place:
        ours.setblocking(False)
        try:
            ours.connect(f"/proc/self/fd/{place}/{name}")
        except ConnectionRefusedError:
            os.unlink(name, dir_fd=place)
