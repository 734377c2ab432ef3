"""The directory of a user's leases: fixed, on this machine, the same for notebooks, shells, cron and jobs.

A lease and a ticket are each a FIFO with a ``flock``, and a file beside it that names the owner. The owner has the
FIFO's writing end, which the kernel closes when the last process that has it is gone, however it ended; waiters have
the reading end, which hangs up then. (inotify reports the same, but before the lock is free, and a user may have only
128 of those.) All changes are made under one lock, which is held for moments only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlaunch.base.own_files import is_own_directory, open_file

VARIABLE = "MLAUNCH_LEASE_DIR"
_TMP, _RUNTIME = "/tmp", "/run/user"
_LOCK = "lock"
_BLOCK = 512  # bytes: records are padded to multiples of this


def place(environ: Mapping[str, str]) -> Path:
    """Return the directory of this user's leases; not by TMPDIR or XDG_RUNTIME_DIR, which differ between jobs."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    fixed, own = Path(f"{_TMP}/mlaunch-{os.getuid()}-leases"), Path(f"{_RUNTIME}/{os.getuid()}")
    # A login's own directory ends with the login, and launches may not; so it is used only if another user was first in
    # /tmp, which all launches of this user see.
    taken = os.path.lexists(fixed) and not is_own_directory(fixed)
    return own / "mlaunch-leases" if taken and is_own_directory(own) else fixed


class LeaseDirectory:
    """The opened directory. ``fd`` has a shared lock, which keeps systemd-tmpfiles from cleaning it up."""

    def __init__(self, path: Path) -> None:
        """Open the directory, and make it if there is none.

        Raises:
            OSError: It cannot be made or opened.
            PermissionError: It belongs to another user, or is open to others.
        """
        if not path.is_absolute():
            raise OSError(
                errno.EINVAL, f"{VARIABLE}={path}: all processes that share devices must find it; give an absolute path"
            )
        self.path = path
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            # No link is followed: any user can put one into /tmp.
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(
                error.errno, f"device leases need the directory {path}, which cannot be made or opened "
                f"({error.strerror}); set {VARIABLE} to one that can, the same for all processes that share devices"
            ) from None  # fmt: skip
        try:
            _check_owner(path, os.fstat(self.fd))
            with contextlib.suppress(OSError):  # some file systems cannot
                fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._lock = open_file(_LOCK, os.O_RDWR | os.O_CREAT, dir_fd=self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> None:
        """Lock the directory until the block ends. FileNotFoundError: it was removed."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if os.fstat(self.fd).st_nlink == 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            raise FileNotFoundError(
                errno.ENOENT, f"somebody has removed {self.path}, the directory of device leases, while this launch "
                f"waited: which launch has which device is no longer known. Wait for the end of the launches that hold "
                f"devices (mlaunch ps), and call again"
            )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._lock)
        os.close(self.fd)

    def fds(self) -> list[int]:
        return [self._lock, self.fd]

    def names(self, start: str) -> list[str]:
        """Return the FIFOs whose names begin with ``start``, in order."""
        return sorted(name for name in os.listdir(self.fd) if name.startswith(start) and not name.endswith(".json"))

    def take(self, name: str, said: Mapping[str, Any]) -> int:
        """Take a free FIFO; return the descriptor that holds it. Called under the lock."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(name, 0o600, dir_fd=self.fd)
        # For reading, too: Linux refuses to open a FIFO for writing without a reader.
        fd = self._opened(name, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._say(name + ".json", said)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def watch(self, name: str) -> int | None:
        """Return a descriptor that hangs up when this FIFO's owner is gone; None: it is free. Called under the lock."""
        try:
            fd = self._opened(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            # Its owners share a lock, which ends with the last of their descriptors.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return fd
        os.close(fd)
        return None

    def _opened(self, name: str, flags: int) -> int:
        """Open a FIFO. FileNotFoundError: there is none; OSError for anything else of this name."""
        fd = -1
        with contextlib.suppress(IsADirectoryError, PermissionError):
            try:
                fd = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            except OSError as error:
                if error.errno not in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
                    raise
        if fd >= 0 and stat.S_ISFIFO(os.fstat(fd).st_mode):
            return fd
        if fd >= 0:
            os.close(fd)
        raise FileExistsError(errno.EEXIST, f"{self.path / name} is in the way of a device's lease: remove it")

    def said(self, name: str) -> dict[str, Any]:
        """Return the record of the present or last owner; {} if it was killed while it wrote it."""
        with contextlib.suppress(OSError, ValueError):
            with open(name + ".json", encoding="utf-8", opener=self._open) as file:
                found = json.load(file)
            return found if isinstance(found, dict) else {}
        return {}

    def _say(self, name: str, said: Mapping[str, Any]) -> None:
        """Overwrite the record: truncating a file on ext4 first takes ten times as long as all the rest."""
        data = json.dumps(said).encode()
        data += b" " * (-len(data) % _BLOCK)
        # Through no link: a sandbox of this user that shares /tmp could point one at a file that it may not write.
        fd = open_file(name, os.O_RDWR | os.O_CREAT, dir_fd=self.fd)
        try:
            os.pwrite(fd, data, 0)
            if os.fstat(fd).st_size > len(data):
                os.ftruncate(fd, len(data))
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        for path in (name, name + ".json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path, dir_fd=self.fd)

    def _open(self, path: str, flags: int) -> int:
        return open_file(path, flags, dir_fd=self.fd)


def _check_owner(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.getuid() and not mode & 0o077:
        return
    remedy = f"chmod 700 {path}" if status.st_uid == os.getuid() else f"set {VARIABLE} to a directory of yours"
    raise PermissionError(
        f"{path} must belong to this user with mode 0700, but it belongs to uid {status.st_uid} with mode "
        f"{mode:04o}: {remedy}"
    )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[LeaseDirectory]:
    directory = LeaseDirectory(path)
    try:
        yield directory
    finally:
        directory.close()
