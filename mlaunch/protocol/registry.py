"""The registry of a user's running launches: a directory of that user only, with a socket for each launch."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlaunch.base.own_files import is_own_directory

_SUFFIX = ".sock"
_UNFINISHED = ".new"
_MOMENT = 60  # seconds
_BACKLOG = 16


def candidates(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories that a launch of this user may have chosen, the one for ``environ`` first.

    A notebook server may run with other variables than the shell in which its user looks for it. For the same reason
    the last is a fixed place, not the current temporary directory, which jobs change.
    """
    uid = os.getuid()
    chosen = [Path(environ["XDG_RUNTIME_DIR"])] if environ.get("XDG_RUNTIME_DIR") else []
    usual = [Path(f"/run/user/{uid}/mlaunch"), Path(f"/tmp/mlaunch-{uid}")]
    return list(dict.fromkeys([*(path / "mlaunch" for path in chosen), *usual]))


def home(environ: Mapping[str, str]) -> Path:
    """Return the directory in which a launch with ``environ`` puts its socket."""
    if environ.get("XDG_RUNTIME_DIR"):
        return candidates(environ)[0]
    # The directory of the login if there is one: in /tmp another user may have made the directory first.
    usual, fixed = candidates(environ)[-2:]
    return usual if is_own_directory(usual.parent) else fixed


def name_of(launch_id: str, rank_start: int) -> str:
    """Return the name of a machine's part of a launch, whose other parts may be on the same host."""
    return f"{launch_id}-{rank_start}" if rank_start else launch_id


def listen(environ: Mapping[str, str], launch_id: str) -> socket.socket:
    """Make a listening socket for this launch. OSError if that is impossible: a launch continues without one."""
    directory = home(environ)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    with opened(directory) as place:
        unfinished, finished = _path(place, launch_id, _UNFINISHED), _path(place, launch_id, _SUFFIX)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A process that finds a socket on which nobody listens takes it for a leftover, and removes it.
            listener.bind(unfinished)
            try:
                listener.listen(_BACKLOG)
                os.link(unfinished, finished)  # a rename would replace what is there
            finally:
                os.unlink(unfinished)
        except OSError:
            listener.close()
            raise
    listener.setblocking(False)
    return listener


def remove(environ: Mapping[str, str], launch_id: str) -> None:
    """Remove the launch's sockets, if any, also an unfinished one, unless a process listens on them."""
    for suffix in (_SUFFIX, _UNFINISHED):
        with contextlib.suppress(OSError), opened(home(environ)) as place:
            _remove_if_dead(_path(place, launch_id, suffix))


def connect(environ: Mapping[str, str], launch_id: str) -> socket.socket | None:
    """Return a socket that is connected to this launch; None if it does not listen, or its queue is full."""
    with contextlib.suppress(OSError), opened(home(environ)) as place:
        return _connect(_path(place, launch_id, _SUFFIX))
    return None


def reach(environ: Mapping[str, str], name: str, patience: int) -> socket.socket | None:
    """Return a socket that is connected to the launch of this name, in any directory; None as for ``connect``.

    ``patience``: seconds to wait for others in its queue.
    """
    for directory in candidates(environ):
        with contextlib.suppress(OSError), opened(directory) as place:
            if (connection := _connect(_path(place, name, _SUFFIX), patience)) is not None:
                return connection
    return None


def _path(place: str, launch_id: str, suffix: str) -> str:
    """Return the path of a launch's socket. OSError for an id that leads to another directory."""
    if os.path.basename(launch_id) != launch_id:
        raise OSError(errno.EINVAL, "no launch has such an id", launch_id)
    return f"{place}/{launch_id}{suffix}"


def connections(environ: Mapping[str, str], patience: int = 0) -> Iterator[tuple[str, socket.socket]]:
    """Yield (id, connected socket) of every running launch. Remove sockets that a killed launch left behind.

    A launch with many visitors is left out if it has not accepted some of them after ``patience`` seconds.
    """
    for directory in candidates(environ):
        try:
            with opened(directory) as place:
                for name in sorted(os.listdir(place)):
                    connection = _connect(f"{place}/{name}", patience) if name.endswith(_SUFFIX) else None
                    if connection is not None:
                        yield name.removesuffix(_SUFFIX), connection
                    elif name.endswith(_UNFINISHED):
                        _remove_if_old(f"{place}/{name}")
        except FileNotFoundError:
            continue
        except OSError:  # another user's, without launches of this user; but it may be the place for this environment
            if directory == home(environ):
                raise


def _remove_if_dead(path: str) -> None:
    connection = _connect(path)
    if connection is not None:
        connection.close()


def _remove_if_old(path: str) -> None:
    """Remove the socket of a launch that was killed before it could listen."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.lstat(path).st_mtime > _MOMENT:
            os.unlink(path)


def _connect(path: str, patience: int = 0) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(patience > 0)
    # The kernel's own timeout: with one of Python's, a full queue fails at once.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", patience, 0))
    try:
        connection.connect(path)
    except ConnectionRefusedError:  # its owner ended without removing it
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):  # a file of another kind refuses, too
                os.unlink(path)
    except (FileNotFoundError, BlockingIOError):  # it ended just now; its queue is full, or has been for too long
        pass
    else:
        connection.setblocking(True)
        return connection
    connection.close()
    return None


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[str]:
    """Yield a short path to the directory; PermissionError unless it belongs to this user only.

    The path of a socket may have 107 bytes.
    """
    with opened_fd(directory) as fd:
        yield f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def opened_fd(directory: Path) -> Iterator[int]:
    """Yield a descriptor of the directory; errors as for ``opened``."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                f"{directory} must belong to this user with mode 0700, but it belongs to uid {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}; set XDG_RUNTIME_DIR to a directory of yours, or remove it"
            )
        yield fd
    finally:
        os.close(fd)
