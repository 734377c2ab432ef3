"""What a fork of this process forgets, closes and unlocks: the one place where mlaunch's modules know forks.

A fork has a copy of all that its parent has, and of its threads the one that forked. So it closes what is the parent's
(by holding the other end it would keep machines, devices and files that nobody uses any more), forgets what a thread of
the parent goes on with, and makes locks anew, which a thread that it does not have may have held.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from mlaunch.base.log import log


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
