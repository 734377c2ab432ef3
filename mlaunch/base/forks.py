"""What a fork of the caller lets go of: by holding the other end it would keep machines that nobody uses any more."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> object: ...


_owners: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_forks(owner: _Closable) -> None:
    """Lets each fork of this process close what ``owner`` holds, as long as that lives."""
    _owners.add(owner)


def _close() -> None:
    for owner in list(_owners):
        with contextlib.suppress(OSError):  # it was closed before
            owner.close()


# Also the user's own forks: one that keeps a connection would keep machines from noticing that the caller is gone.
os.register_at_fork(after_in_child=_close)
