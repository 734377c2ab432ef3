"""One file per rank, attempt and stream: DIRECTORY/attempt_0/RANK/stdout.log."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from typing import BinaryIO

NAMES = {1: "stdout.log", 2: "stderr.log"}


class LogFile:
    """Takes bytes as they come. A file that cannot be written is told of once, and what follows is not kept."""

    def __init__(self, directory: str, attempt: int, rank: int, stream: int, complain: Callable[[str], None]) -> None:
        self.path = os.path.join(directory_of(directory, attempt, rank), NAMES[stream])
        self._complain = complain
        self._file: BinaryIO | None = None
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            # Without a buffer: what a rank printed before it died is in the file when people look.
            self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 - close() ends it
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while self._file is not None and left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _give_up(self, error: OSError) -> None:
        self._complain(f"{self.path} cannot be written ({error.strerror}): what this rank prints now is not kept there")
        self.close()


def new_directory(base: str | os.PathLike[str], name: str) -> str:
    """Makes a directory for one launch in ``base``; its name starts with ``name``. OSError where there can be none."""
    base = os.path.abspath(os.fspath(base))
    os.makedirs(base, exist_ok=True)
    return tempfile.mkdtemp(prefix=re.sub(r"[^\w.-]+", "-", name).strip("-") + "_", dir=base)


def directory_of(directory: str, attempt: int, rank: int) -> str:
    """Says where one rank's files are."""
    return os.path.join(directory, f"attempt_{attempt}", str(rank))
