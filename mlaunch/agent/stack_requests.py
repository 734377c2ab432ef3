"""Requests for the Python stacks of ranks, by a signal, and their answers."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection

from mlaunch.agent.rank_process import RankProcess
from mlaunch.base.frames import ALL_STACKS_SIGNAL, STACK_SIGNAL, STACKS_TIMEOUT, in_letters, is_whole_stack
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import Phase

_READ = 65536  # bytes: a pipe holds no more
_LONG_ENOUGH = 0.05  # seconds of running in which a rank that has got the signal has answered
_FIELD = re.compile(r"^(State|VmSize|SigCgt|SigPnd|ShdPnd):\s+(\w+)", re.MULTILINE)


@frozen_record
class _Request:
    """``at``: when it was made; ``has_run``: how long the main thread had run by then."""

    rank: RankProcess
    at: float
    has_run: float

    def may_be_answered(self) -> bool:
        """True if the handler may be at it: it has begun to write, or the rank has hardly run since.

        Handlers run nested on a small stack of their own, and a rank would die of too many (SIGSEGV).
        """
        pid = self.rank.pid
        return bool(self.rank.stacks) or (state_of(pid) in _AWAKE and _has_run(pid) < self.has_run + _LONG_ENOUGH)


class StackRequests:
    """Ranks that were asked for their stacks and have not answered in full; true while there are any.

    ``request`` asks one rank by a signal, and is false if that rank cannot answer.
    """

    def __init__(self, request: Callable[[int, Phase, int], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._request = request
        self._clock = clock
        self._pending: dict[int, _Request] = {}  # by stack_fd

    def __bool__(self) -> bool:
        return bool(self._pending)

    def fds(self) -> list[int]:
        return list(self._pending)

    def ask(self, rank: RankProcess, phase: Phase, *, all_threads: bool = False) -> None:
        """Ask for the stack of its main thread; with ``all_threads`` for all, which may kill the rank.

        One that has not answered in time is asked again: the kernel drops a signal that comes as faulthandler, at the
        end of an earlier answer, has put its handler aside for a moment.
        """
        last = self._pending.get(rank.stack_fd)
        if last is not None and (self._clock() < last.at + STACKS_TIMEOUT or last.may_be_answered()):
            return
        while read_some(rank.stack_fd):  # an earlier answer that came too late
            pass
        rank.stacks = ""
        if self._request(rank.pid, phase, ALL_STACKS_SIGNAL if all_threads else STACK_SIGNAL):
            self._pending[rank.stack_fd] = _Request(rank, self._clock(), _has_run(rank.pid))

    def read(self, ready: Collection[int]) -> None:
        for stack_fd in self._pending.keys() & set(ready):
            rank = self._pending[stack_fd].rank
            text = read_some(stack_fd)
            rank.stacks = in_letters(rank.stacks + text)  # a letter may have come in parts
            if not text or is_whole_stack(rank.stacks):
                del self._pending[stack_fd]

    def forget(self, rank: RankProcess) -> None:
        self._pending.pop(rank.stack_fd, None)

    def clear(self) -> None:
        self._pending.clear()


STOPPED, _AWAKE = frozenset("Tt"), frozenset("RD")  # the kernel's letters


def _has_run(pid: int) -> float:
    """Return the seconds for which the process's main thread has run; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9
    return 0.0


def state_of(pid: int) -> str:
    """Return the kernel's letter for the process: R, S, D, T, t, Z; "" if it is gone."""
    return _status(pid).get("State", "")


def _status(pid: int) -> dict[str, str]:
    """Return a process's state, size, and handled and pending signals, in the kernel's words; {}: it is gone."""
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file,
    ):
        return dict(_FIELD.findall(file.read()))
    return {}


def _listens(status: dict[str, str], number: int) -> bool:
    """True if the process has a handler for the signal, which would else kill it, and has taken the last one.

    A real-time signal waits in the kernel as often as it was sent, and all of them would meet in the handler at once.
    """
    caught, *pending = (int(status[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigPnd", "ShdPnd"))
    return bool(caught) and not any(pending)


def request(pid: int, phase: Phase, number: int) -> bool:
    """Ask a rank for its stacks by that signal; False if it could not answer now (stopped, gone, or not listening).

    One that waits in the kernel (D) mostly does so for a moment, until a page is there.
    """
    status = {} if phase is Phase.STARTING else _status(pid)
    if status.get("State") not in {"R", "S", "D"} or not _listens(status, number):
        return False
    with contextlib.suppress(ProcessLookupError):
        # By number: it is our child and not reaped, so the number is its own.
        os.kill(pid, number)
        return True
    return False


def is_ending(pid: int, phase: Phase) -> bool:
    """True if a rank's process is about to end: it has no memory any more, or has become another program.

    That one has no handler for the signal that asks for stacks, which each rank has once it has started.
    """
    status = _status(pid)
    caught = int(status.get("SigCgt", "0"), 16) >> (STACK_SIGNAL - 1) & 1
    return "VmSize" not in status or (phase is not Phase.STARTING and not caught)


def read_some(fd: int) -> str:
    """Return what has arrived in the pipe; "" at its end."""
    try:
        return os.read(fd, _READ).decode(errors="replace")
    except BlockingIOError:
        return ""
