"""The file descriptors of a process that its forks must not hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from collections.abc import Iterable, Iterator

from mlaunch.base import linux

_SIZE_STAYS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory_file(name: str) -> int:
    """Makes an empty file in memory, whose size can be fixed. Closed on exec."""
    return linux.above_standard(os.memfd_create(f"mlaunch-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def fix_size(fd: int) -> int:
    """Makes the size of a file in memory final, before it is mapped; returns the size.

    Whoever has a file that others have mapped could shrink it otherwise, and the kernel would kill them as they read.
    One that other code has made may not allow it.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_STAYS)
    return os.fstat(fd).st_size


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


class KeptFd:
    """A descriptor that this process keeps while code of others runs in it, which may close it and open its own.

    Descriptors without an inode of their own (eventfds, epolls) can be told from files, but not from each other: that
    tells ``KeptEpoll.watches``, and then ``forget`` is for those that are somebody else's.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = linux.identity(fd)

    def intact(self) -> bool:
        """Tells whether the number still stands for what it did."""
        return self._identity is not None and linux.identity(self.fd) == self._identity

    def close(self) -> None:
        """Closes the descriptor, unless it was closed or has become somebody else's."""
        if self.intact():
            os.close(self.fd)
        self._identity = None

    def forget(self) -> None:
        """Leaves the number to whoever has it now."""
        self._identity = None


class KeptEpoll(KeptFd):
    """An epoll that this process keeps; ``poll`` is it."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        super().__init__(self.poll.fileno())

    def watches(self, fd: int, events: int) -> bool:
        """Tells whether both are what they were when the descriptor was registered for these events.

        The kernel finds it by number and open file, so it finds none if a stranger's stands at either number.
        """
        try:
            self.poll.modify(fd, events)
        except OSError:
            return False
        except ValueError:  # closed by ourselves
            return True
        return True

    def close(self) -> None:
        """Closes the descriptor, unless its number was closed or has become another file's."""
        if self.intact():
            self.poll.close()
        else:
            self.forget()
        self._identity = None

    def forget(self) -> None:
        """Leaves the number to whoever has it now."""
        if self._identity is not None:
            _lost.append(self.poll)
        super().forget()


_lost: list[select.epoll] = []  # one that is collected closes its number, which others may have by now


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def ready(readers: Iterable[int], writers: Iterable[int], milliseconds: float | None) -> set[int]:
    """Waits until one can be read, or written to, and returns all that can. In both, writing counts."""
    # Not select(), which takes no descriptor from 1024 on.
    poll = select.poll()
    for fds, event in ((readers, select.POLLIN), (writers, select.POLLOUT)):
        for fd in fds:
            poll.register(fd, event)
    return {fd for fd, _ in poll.poll(milliseconds)}
