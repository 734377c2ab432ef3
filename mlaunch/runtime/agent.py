"""The supervisor of one machine's ranks: starts them, passes on their answers, stops all at the first failure.

One loop waits on everything at once: the result queue, each rank's pidfd, the rendezvous server's, the launcher's
channel, the fork server's pidfd, the next deadline. Single-threaded; nothing polls.

    running --first failure, deadline, cancel--> asking (stacks) --> stopping (SIGTERM) --grace period--> killing

A first failure that looks like the consequence of another rank's is held for a moment, so that the ranks that are
about to tell the cause are still there to tell it. A lost launcher or fork server skips the asking.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from mlaunch.rendezvous.server import Server
from mlaunch.runtime import linux, stacks
from mlaunch.runtime.answers import Answers
from mlaunch.runtime.channel import Channel
from mlaunch.runtime.evidence import Evidence
from mlaunch.runtime.messages import (
    Answer,
    Cancel,
    DeadlinePassed,
    Kind,
    Phase,
    RankAnswered,
    RankGone,
    RankStacks,
    ServerGone,
)

CAUSE_PATIENCE = 0.1  # seconds in which the cause may follow its consequence
_TEXT_LIMIT = 32_768  # characters of a rank's stacks; a record is small


@dataclass
class RankProcess:
    """A rank as its supervisor knows it. ``pid`` leads the rank's process group."""

    rank: int
    pid: int
    pidfd: int
    memfd: int  # of its answer
    crash_fd: int  # of its stacks, if it crashes
    stack_fd: int  # the pipe of its stacks, if we ask
    stacks: str = ""
    answered: bool = False
    stopped: bool = False  # told to stop, or killed, by us


@dataclass(frozen=True)
class Limits:
    """In seconds. ``deadline``: for the whole call, None = no limit."""

    grace_period: float
    deadline: float | None = None


@dataclass(frozen=True)
class Signals:
    """How ranks are reached. ``request`` asks for stacks; False: that rank cannot answer."""

    group: Callable[[int, int], None] = linux.signal_group
    request: Callable[[int, Phase], bool] = stacks.request


class Agent:
    """Supervises ``ranks`` until all are reaped. ``parent``: a pidfd of the process that must outlive us."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        answers: Answers,
        server: Server,
        launcher: Channel,
        parent: int,
        *,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        signals: Signals | None = None,
    ) -> None:
        self._ranks = {rank.pidfd: rank for rank in ranks}
        self._by_local_rank = list(ranks)
        self._answers = answers
        self._server: Server | None = server
        self._launcher = launcher
        self._listening = {launcher.fileno(), parent}
        self._limits = limits
        self._clock = clock
        self._signals = signals or Signals()
        # When each step is due; None: not at all, or done.
        self._deadline_at = None if limits.deadline is None else clock() + limits.deadline
        self._ask_at: float | None = None
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._stopping = False  # the first step has been taken
        self._evidence = Evidence()
        self._asked: dict[int, RankProcess] = {}  # by stack_fd: those that have not answered

    def run(self) -> None:
        while self._ranks:
            ready = {fd for fd in wait(self._sources(), self._patience()) if isinstance(fd, int)}
            self._drain()
            if self._server is not None and self._server.sentinel in ready:
                self._lose_server()
            for stack_fd in ready & set(self._asked):
                self._read_stacks(stack_fd)
            for pidfd in ready & set(self._ranks):
                self._reap(self._ranks.pop(pidfd))
            for fd in ready & self._listening:
                self._hear(fd)
            self._escalate()
        spare = set()
        if self._server is not None:
            self._server.kill()
            spare.add(self._server.pid)  # it dies while we do; the fork server reaps both
        linux.kill_children(spare)

    # What is waited for

    def _sources(self) -> list[int]:
        sentinel = [] if self._server is None else [self._server.sentinel]
        return [self._answers.queue.fileno(), *self._ranks, *self._asked, *sentinel, *self._listening]

    def _patience(self) -> float | None:
        """Seconds until the next step is due, None if none is."""
        steps = (self._deadline_at, self._ask_at, self._terminate_at, self._kill_at)
        due = [step for step in steps if step is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    # What happens

    def _drain(self) -> None:
        for answer in self._answers.queue.drain():
            self._pass_on(answer)

    def _pass_on(self, answer: Answer) -> None:
        rank = self._by_local_rank[answer.local_rank]
        rank.answered = True
        record = RankAnswered(rank.rank, rank.pid, answer.kind, answer.consequence, self._clock())
        self._launcher.tell(record, [rank.memfd])
        if answer.kind is not Kind.VALUE:
            self._stop_within(CAUSE_PATIENCE if answer.consequence else 0.0)

    def _reap(self, rank: RankProcess) -> None:
        # Its group goes while the dead leader still holds the number, so that no other group can be hit.
        self._signals.group(rank.pid, signal.SIGKILL)
        _, status, usage = os.wait4(rank.pid, 0)
        self._drain()  # an answer sent just before death counts
        exitcode = os.waitstatus_to_exitcode(status)
        record = RankGone(
            rank=rank.rank,
            pid=rank.pid,
            exitcode=exitcode,
            phase=self._phase(rank),
            answered=rank.answered,
            stopped=rank.stopped,
            at=self._clock(),
            hints=() if rank.stopped else self._evidence.hints(exitcode, usage.ru_maxrss * 1024),
        )
        self._launcher.tell(record, [rank.crash_fd])
        self._asked.pop(rank.stack_fd, None)
        for fd in (rank.pidfd, rank.memfd, rank.crash_fd, rank.stack_fd):
            os.close(fd)
        if exitcode != 0:
            self._stop_within(0.0)

    def _phase(self, rank: RankProcess) -> Phase:
        return self._answers.phases[self._by_local_rank.index(rank)]

    def _lose_server(self) -> None:
        if self._server is None:
            return
        pid, exitcode = self._server.pid, self._server.reap()
        self._server = None
        self._launcher.tell(ServerGone(pid, exitcode, self._clock()))
        self._stop_within(0.0)

    def _hear(self, fd: int) -> None:
        """The launcher cancels, or the launcher or the fork server is gone."""
        try:
            record = self._launcher.receive()[0] if fd == self._launcher.fileno() else None
        except EOFError:
            record = None
        if record is None:
            self._listening.discard(fd)
        force = isinstance(record, Cancel) and record.force
        if record is not None and not force:
            self._stop_within(0.0)
            return
        self._terminate()  # nobody is left to hear of stacks
        due = self._clock() + (0.0 if force else self._limits.grace_period)
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    # Stopping

    def _stop_within(self, seconds: float) -> None:
        if not self._stopping:
            due = self._clock() + seconds
            self._ask_at = due if self._ask_at is None else min(due, self._ask_at)

    def _escalate(self) -> None:
        """Takes the steps that are due, in their order."""
        now = self._clock()
        if self._deadline_at is not None and now >= self._deadline_at:
            self._deadline_at = None
            self._launcher.tell(DeadlinePassed())
            self._stop_within(0.0)
        if self._ask_at is not None and now >= self._ask_at:
            self._ask()
        if self._terminate_at is not None and (not self._asked or now >= self._terminate_at):
            self._terminate()
            self._kill_at = now + self._limits.grace_period
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _ask(self) -> None:
        """For their stacks, before they are stopped."""
        self._stopping, self._ask_at, self._deadline_at = True, None, None
        self._terminate_at = self._clock() + stacks.PATIENCE
        for rank in self._working():
            if self._signals.request(rank.pid, self._phase(rank)):
                self._asked[rank.stack_fd] = rank

    def _read_stacks(self, stack_fd: int) -> None:
        rank = self._asked[stack_fd]
        text = stacks.read_some(stack_fd)
        rank.stacks += text
        if not text or stacks.is_whole(rank.stacks):
            del self._asked[stack_fd]

    def _terminate(self) -> None:
        """Asks to end. A rank that has answered is leaving by itself and is left to it."""
        self._stopping, self._ask_at, self._deadline_at, self._terminate_at = True, None, None, None
        self._asked.clear()
        for rank in self._working():
            state = stacks.state_of(rank.pid)
            record = RankStacks(rank.rank, self._phase(rank), state, rank.stacks[-_TEXT_LIMIT:])
            self._launcher.tell(record)
            rank.stopped = True
            self._signals.group(rank.pid, signal.SIGTERM)

    def _working(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if not rank.answered and not rank.stopped]

    def _kill(self) -> None:
        """Forces."""
        for rank in self._ranks.values():
            rank.stopped = True
            self._signals.group(rank.pid, signal.SIGKILL)
        self._kill_at = None
