"""Files in directories that other users can write to: opened only if they are files of this user, and no links."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence

_THERE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Open a file as ``os.open`` does, and return its descriptor. Never wait, as opening a FIFO would.

    Raises:
        OSError: It cannot be opened; ELOOP for a link, EINVAL if it is no regular file.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def is_own_directory(path: str | os.PathLike[str]) -> bool:
    """True if it is a directory of this user, and no link to one."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


@contextlib.contextmanager
def this_users_directory(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yield a descriptor of a directory of this user. OSError: there is none, it is a link, or another user's."""
    fd = os.open(path, _THERE)
    try:
        owner = os.fstat(fd).st_uid
        # File servers give root's files to another user: a new file shows to whom.
        if owner not in {os.geteuid(), _owner_of_new_file(fd) if os.geteuid() == 0 else -1}:
            raise PermissionError(errno.EACCES, f"it belongs to another user (uid {owner})", os.fspath(path))
        yield fd
    finally:
        os.close(fd)


def make_file(path: str | os.PathLike[str], parts: Sequence[str], name: str) -> int:
    """Make a file for writing below a directory of this user, with the directories that are missing.

    Raises:
        OSError: It cannot be made, is there already, or a link or another user's directory is on the way.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    with this_users_directory(path) as top:
        fd = os.dup(top)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o777, dir_fd=fd)
                inner = os.open(part, _THERE, dir_fd=fd)
                os.close(fd)
                fd = inner
            return open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=fd)
        finally:
            os.close(fd)


def remove_directory(path: str | os.PathLike[str]) -> None:
    """Remove a directory of this user with its content, as far as possible; leave another user's."""
    with contextlib.suppress(OSError), this_users_directory(path):
        shutil.rmtree(path, ignore_errors=True)


def _owner_of_new_file(directory: int) -> int:
    name = f".mlaunch-{secrets.token_hex(8)}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=directory)
