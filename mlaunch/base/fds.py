"""The file descriptors of a process that its forks must not hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator


class OwnedFds:
    """Grows as its process opens them; each fork closes them first.

    A channel is seen to end only when every process has closed it, so one that a fork keeps by mistake keeps others
    waiting.
    """

    def __init__(self, *fds: int) -> None:
        self._fds = set(fds)

    def add(self, *fds: int) -> None:
        self._fds.update(fds)

    def close(self, *fds: int) -> None:
        """Closes some in the process that owns them."""
        for fd in fds:
            self._fds.discard(fd)
            os.close(fd)

    def close_in_child(self) -> None:
        """Closes all, in a fork."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def __iter__(self) -> Iterator[int]:
        return iter(self._fds)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
