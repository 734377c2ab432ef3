"""The file descriptors of a process, and what its forks must not hold of it.

A fork has a copy of all that its parent has, and of its threads the one that forked. So it closes what is the parent's
(by holding the other end it would keep machines, devices and files that nobody uses any more), forgets what a thread of
the parent goes on with, and makes locks anew, which a thread that it does not have may have held. This is the one place
where mlaunch's modules know forks (``in_forks``, ``close_in_forks``, ``renewed``).
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

    def watches(self, fd: int, mask: int) -> bool:
        """Tells whether both are what they were when the descriptor was registered for these events.

        The kernel finds it by number and open file, so it finds none if a stranger's stands at either number.
        """
        try:
            self.poll.modify(fd, mask)
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


# Forks


class _Closable(Protocol):
    def close(self) -> object: ...


_L = TypeVar("_L")
_owners: weakref.WeakSet[_Closable] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_forget: list[Callable[[], object]] = []  # in the order in which they were registered


def in_forks(forget: Callable[[], object]) -> None:
    """Call this first thing in each fork of this process."""
    _forget.append(forget)


def close_in_forks(owner: _Closable) -> None:
    """Let each fork of this process close what ``owner`` holds, as long as that lives."""
    _owners.add(owner)


def renewed(lock: _L) -> _L:
    """Return the lock, which each fork of this process finds free."""
    _locks.add(lock)
    return lock


def leave_to_parent(found: object) -> None:
    """Never let go of this in this process: it is the parent's, and at its end it would tidy up what that goes on with.

    A generator runs its ``finally`` as it is collected, also as the interpreter ends.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def _begin() -> None:
    for lock in list(_locks):
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):  # by the thread that forks
            lock._at_fork_reinit()
    for forget in list(_forget):
        try:
            forget()
        except Exception:  # the others are called all the same
            log.exception("a fork could not forget what is its parent's")
    for owner in list(_owners):
        with contextlib.suppress(OSError):  # it was closed before
            owner.close()


# Also the user's own forks: one that keeps a connection would keep machines from noticing that the caller is gone.
os.register_at_fork(after_in_child=_begin)
