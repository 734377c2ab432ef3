"""The files of ``log_dir``, one per attempt, rank and stream: DIRECTORY/attempt_0/RANK/stdout.log."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable
from typing import BinaryIO

from mlaunch.base.own_files import make_file

NAMES = {1: "stdout.log", 2: "stderr.log"}


class LogFile:
    """A file, made with its directory at the first byte.

    If it cannot be written, that is reported once, and what follows is not kept.
    """

    def __init__(self, directory: str, attempt: int, rank: int, stream: int, complain: Callable[[str], None]) -> None:
        self.path = os.path.join(directory_of(directory, attempt, rank), NAMES[stream])
        self._place = directory, _parts(attempt, rank), NAMES[stream]
        self._complain = complain
        self._file: BinaryIO | None = None
        self._closed = False

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            if not self._closed and self._file is None:
                # Unbuffered: what a rank printed before it died is in the file at once. Not by its path: a user who
                # may rename in log_dir could have put a link, or a directory, in the way.
                self._file = open(make_file(*self._place), "wb", buffering=0)  # noqa: SIM115 - close() ends it
            while self._file is not None and left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        self._closed = True
        if self._file is not None:
            self._file.close()
        self._file = None

    def _give_up(self, error: OSError) -> None:
        self._complain(f"{self.path} cannot be written ({error.strerror}): what this rank prints now is not kept there")
        self.close()


def new_directory(base: str | os.PathLike[str], name: str) -> str:
    """Make a directory for one launch in ``base``; its name starts with ``name``. OSError if it cannot be made."""
    return tempfile.mkdtemp(prefix=_prefix(name), dir=_made(base))


def own_directory(base: str | os.PathLike[str], name: str) -> str:
    """Return a path as ``new_directory`` does, which a call's first file makes: most calls print nothing."""
    base = _made(base)
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return os.path.join(base, _prefix(name) + os.urandom(6).hex())


def kept(directory: str | None) -> str | None:
    """Return the directory if something was written there; else None."""
    return directory if directory is not None and os.path.isdir(directory) else None


def _made(base: str | os.PathLike[str]) -> str:
    base = os.path.abspath(os.fspath(base))
    os.makedirs(base, exist_ok=True)
    return base


def _prefix(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") + "_"


def directory_of(directory: str, attempt: int, rank: int) -> str:
    """Return the directory of one rank's files."""
    return os.path.join(directory, *_parts(attempt, rank))


def _parts(attempt: int, rank: int) -> tuple[str, str]:
    return f"attempt_{attempt}", str(rank)
