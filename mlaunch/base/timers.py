"""How late the timers of a thread may be."""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30
_libc = ctypes.CDLL(None)


def slack() -> int:
    """Returns by how many nanoseconds timers of this thread may be late."""
    return int(_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))


def set_slack(nanoseconds: int) -> None:
    _libc.prctl(_PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)
