"""The file descriptors of a process, and what its forks must not keep.

A fork has a copy of all that its parent has, and only the thread that forked. So it closes its parent's descriptors
(which would keep machines, devices and files in use), forgets the work of the parent's other threads, and replaces
locks that one of those may have held. Only this module acts in forks (``in_forks``, ``close_in_forks``, ``renewed``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from mlaunch.base import linux
from mlaunch.base.log import log

_SIZE_STAYS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory_file(name: str) -> int:
    """Make an empty file in memory, whose size can be fixed. Closed on exec."""
    return linux.above_standard(os.memfd_create(f"mlaunch-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def fix_size(fd: int) -> int:
    """Make the size of a file in memory final, before it is mapped; return the size.

    Otherwise a process could shrink the file, and the kernel would kill those that read what they have mapped. A file
    that other code has made may refuse it.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_STAYS)
    return os.fstat(fd).st_size


class OwnedFds:
    """The descriptors that a process owns, and that each fork closes first.

    A channel ends only when every process has closed it: one that a fork keeps by mistake keeps others waiting.
    """

    def __init__(self, *fds: int) -> None:
        self._fds = set(fds)

    def add(self, *fds: int) -> None:
        self._fds.update(fds)

    def close(self, *fds: int) -> None:
        """Close some of them in the process that owns them."""
        for fd in fds:
            self._fds.discard(fd)
            os.close(fd)

    def close_in_child(self) -> None:
        """Close all of them in a fork."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def __iter__(self) -> Iterator[int]:
        return iter(self._fds)


class KeptFd:
    """A descriptor that this process keeps while other code runs in it, which may close it and reuse its number.

    Descriptors without an inode of their own (eventfds, epolls) differ from files, but not from each other:
    ``KeptEpoll.watches`` finds out, and then ``forget`` is for those that belong to other code.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = linux.identity(fd)

    def intact(self) -> bool:
        """True if the number is still this descriptor's."""
        return self._identity is not None and linux.identity(self.fd) == self._identity

    def close(self) -> None:
        """Close the descriptor, unless it was closed or its number was reused."""
        if self.intact():
            os.close(self.fd)
        self._identity = None

    def forget(self) -> None:
        """Leave the number to the code that has it now."""
        self._identity = None


class KeptEpoll(KeptFd):
    """An epoll, ``poll``, that this process keeps."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        super().__init__(self.poll.fileno())

    def watches(self, fd: int, mask: int) -> bool:
        """True if epoll and descriptor are still those that were registered for these events.

        The kernel looks them up by number and open file, so it finds none if either number was reused.
        """
        try:
            self.poll.modify(fd, mask)
        except OSError:
            return False
        except ValueError:  # closed by ourselves
            return True
        return True

    def close(self) -> None:
        """Close the epoll, unless it was closed or its number was reused."""
        if self.intact():
            self.poll.close()
        else:
            self.forget()
        self._identity = None

    def forget(self) -> None:
        """Leave the number to the code that has it now."""
        if self._identity is not None:
            _lost.append(self.poll)
        super().forget()


_lost: list[select.epoll] = []  # never collected: that would close the number, which other code may have now


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def ready(readers: Iterable[int], writers: Iterable[int], milliseconds: float | None) -> set[int]:
    """Wait until some descriptors are readable or writable, and return these. In both lists, one counts as a writer."""
    # Not select(), which takes no descriptor from 1024 on.
    poll = select.poll()
    for fds, event in ((readers, select.POLLIN), (writers, select.POLLOUT)):
        for fd in fds:
            poll.register(fd, event)
    return {fd for fd, _ in poll.poll(milliseconds)}


# Forks


class _Closable(Protocol):
    def close(self) -> object: ...


_L = TypeVar("_L")
_owners: weakref.WeakSet[_Closable] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_forget: list[Callable[[], object]] = []  # in the order in which they were registered


def in_forks(forget: Callable[[], object]) -> None:
    """Register a function that each fork of this process calls first."""
    _forget.append(forget)


def close_in_forks(owner: _Closable) -> None:
    """Register an owner that each fork of this process closes, as long as the owner lives."""
    _owners.add(owner)


def renewed(lock: _L) -> _L:
    """Return the lock, which will be free in each fork of this process."""
    _locks.add(lock)
    return lock


def leave_to_parent(found: object) -> None:
    """Keep this object of the parent for ever: collected here, it would clean up what the parent still uses.

    A generator runs its ``finally`` when it is collected, and when the interpreter ends.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def _begin() -> None:
    for lock in list(_locks):
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):  # by the thread that forks
            lock._at_fork_reinit()
    for forget in list(_forget):
        try:
            forget()
        except Exception:  # the others are called nevertheless
            log.exception("a fork could not forget what is its parent's")
    for owner in list(_owners):
        with contextlib.suppress(OSError):  # it was closed before
            owner.close()


# The user's own forks, too: while one keeps a connection, machines would not notice that the caller is gone.
os.register_at_fork(after_in_child=_begin)
