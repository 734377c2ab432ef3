"""A rank as its supervisor knows it, its state as the kernel knows it, and requests for its stacks by a signal."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mlaunch.base.fds import memory_file
from mlaunch.base.frames import ALL_STACKS_SIGNAL, STACK_SIGNAL, STACKS_TIMEOUT, in_letters, is_whole_stack
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import (
    Answer,
    AnswerFile,
    AnswerKind,
    ControlHears,
    ControlSays,
    Phase,
    RankGone,
    RankHears,
    RankSays,
    Release,
)
from mlaunch.protocol.payload import Payload

_FIELD = re.compile(r"^(State|VmSize|SigCgt|SigPnd|ShdPnd):\s+(\w+)", re.MULTILINE)
_LONG_ENOUGH = 0.05  # seconds of running in which a rank that has got the signal has answered
_READ = 65536  # bytes: a pipe holds no more
_PIDFD_THREAD = os.O_EXCL  # as the kernel defines it
_EXIT_CODE = 49  # its place in /proc/PID/stat behind the name
_AWAKE = frozenset("RD")  # the kernel's letters for the states of a process that runs, or waits for a moment


@dataclass
class RankProcess:
    """One rank. ``pid`` leads its process group."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    channel: Channel[RankSays, RankHears]  # on which it gets its calls
    crash_fd: int  # of its stacks, if it crashes
    stack_fd: int  # the pipe of its stacks, if we ask
    # On which its control thread answers, whatever the rank does.
    control: Channel[ControlSays, ControlHears] | None = None
    error_file: str = ""  # in which it may note why it fails
    of_python: bool = True  # it becomes no other program
    stacks: str = ""
    answer_fd: int = -1  # the memfd for its answers; -1: it has none
    spent_fd: int = -1  # the one before, which may be mapped
    answer: AnswerKind | None = None  # to the present call
    content: Payload = field(default_factory=Payload)  # of this answer
    stopped: bool = False  # we have told it to stop, or killed it
    ends_at: float | None = None  # since when it ends, by a failure of its own
    gone: bool = False  # reaped

    @property
    def alive(self) -> bool:
        """True if the rank has not been told to stop, and does not end by itself."""
        return not self.stopped and not self.gone and self.ends_at is None

    @property
    def working(self) -> bool:
        """True if the rank is alive and has not answered yet."""
        return self.alive and self.answer is None

    def begin_call(self, record: bytes, call_fds: list[int]) -> None:
        """Send the rank a RunCall, pickled, with a memfd for answers if it needs one."""
        fds = call_fds if 0 <= self.answer_fd != self.content.memfd else [*call_fds, self._renew()]
        self.answer, self.content = None, Payload(memfd=self.answer_fd)  # it may be written to, whatever is said of it
        self.channel.try_send_pickled(record, fds)

    def give_answer_file(self) -> None:
        """Send the rank a memfd for its next answer."""
        self.channel.try_send(AnswerFile(), [self._renew()])

    def _renew(self) -> int:
        if self.spent_fd >= 0:
            os.close(self.spent_fd)
        # A new one for each large answer: the caller maps it privately, and the next answer would be written under
        # that.
        self.spent_fd, self.answer_fd = self.answer_fd, memory_file(f"rank-{self.rank}")
        return self.answer_fd

    def expect(self, answered: bool) -> None:
        """Note a call that the launcher has sent directly. ``answered``: the rank has sent its value already."""
        self.answer, self.content = AnswerKind.VALUE if answered else None, Payload()

    def take(self, answer: Answer) -> None:
        """Note what the rank has answered."""
        self.answer, self.content = answer.kind, Payload(answer.data, -1 if answer.data else self.answer_fd)

    def release(self) -> None:
        """Tell the rank that nothing more comes."""
        self.channel.try_send(Release())

    def describe_end(
        self, exitcode: int, phase: Phase, now: float, peak_memory: int, hints: tuple[str, ...]
    ) -> RankGone:
        """Return a record of its end. ``now``: when it was reaped; ``peak_memory``: bytes; ``hints``: further lines."""
        return RankGone(
            rank=self.rank,
            pid=self.pid,
            exitcode=exitcode,
            phase=phase,
            answered=self.answer is not None,
            stopped=self.stopped,
            at=now if self.ends_at is None else self.ends_at,
            hints=hints,
            peak_memory=peak_memory,
            of_python=self.of_python,
        )

    def close(self) -> None:
        """Close the descriptors of the rank, once it is reaped."""
        self.gone = True
        self.channel.close()
        if self.control is not None:
            self.control.close()
        for fd in (self.pidfd, self.crash_fd, self.stack_fd, self.answer_fd, self.spent_fd):
            if fd >= 0:
                os.close(fd)


@frozen_record
class _Request:
    """A request for stacks. ``at``: when it was made; ``has_run``: how long the main thread had run before."""

    rank: RankProcess
    at: float
    has_run: float

    def may_be_answered(self) -> bool:
        """True if the handler may be running: it has begun to write, or the rank has hardly run since.

        Handlers run nested on a small stack of their own, and a rank would die of too many (SIGSEGV).
        """
        return bool(self.rank.stacks) or self.starved(_AWAKE)

    def starved(self, states: Collection[str] = "R") -> bool:
        """True if the rank could run, by its state, and has hardly run since."""
        return state_of(self.rank.pid) in states and _has_run(self.rank.pid) < self.has_run + _LONG_ENOUGH


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

    def starved(self) -> bool:
        """True if a rank that has not answered waits for a CPU."""
        return any(request.starved() for request in self._pending.values())

    def forget(self, rank: RankProcess) -> None:
        self._pending.pop(rank.stack_fd, None)

    def clear(self) -> None:
        self._pending.clear()


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
    """True if the process has a handler for the signal, which would kill it otherwise, and has taken the last one.

    A real-time signal waits in the kernel as often as it was sent, and all of them would meet in the handler at once.
    """
    caught, *pending = (int(status[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigPnd", "ShdPnd"))
    return bool(caught) and not any(pending)


def request_stacks(pid: int, phase: Phase, number: int) -> bool:
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

    Such a program has no handler for the signal that asks for stacks, which each rank has once it has started.
    """
    status = _status(pid)
    caught = int(status.get("SigCgt", "0"), 16) >> (STACK_SIGNAL - 1) & 1
    return "VmSize" not in status or (phase is not Phase.STARTING and not caught)


def watch_threads(pid: int) -> list[int]:
    """Open pidfds of two threads of a process, the main one and another if there is one; of none on older kernels."""
    found: list[int] = []
    if os.readlink("/proc/self") != str(os.getpid()):  # it numbers processes otherwise
        return found
    others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    for thread in (pid, *others[:1]):
        with contextlib.suppress(OSError):
            found.append(os.pidfd_open(thread, _PIDFD_THREAD))
    return found


def is_failing(pid: int) -> bool:
    """True if a process has begun to end with a status other than 0, which nothing can change any more."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_EXIT_CODE]) != 0
    return False


def read_some(fd: int) -> str:
    """Return what has arrived in the pipe; "" at its end."""
    try:
        return os.read(fd, _READ).decode(errors="replace")
    except BlockingIOError:
        return ""
