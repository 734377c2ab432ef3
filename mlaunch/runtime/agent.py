"""The supervisor of one machine's ranks: starts them, passes on their answers, stops all at the first failure.

One loop waits on everything at once: the result queue, each rank's pidfd, the rendezvous server's, the launcher's
channel, the fork server's pidfd, the next deadline. Single-threaded; nothing polls.

    running --first failure, cancel, or a lost parent--> stopping (SIGTERM) --grace period--> killing (SIGKILL)

A first failure that looks like the consequence of another rank's is held for a moment, so that the ranks that are
about to tell the cause are still there to tell it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from mlaunch.rendezvous.server import Server
from mlaunch.runtime import linux
from mlaunch.runtime.answers import Answers
from mlaunch.runtime.channel import Channel
from mlaunch.runtime.messages import Answer, Cancel, Kind, RankAnswered, RankGone, ServerGone

CAUSE_PATIENCE = 0.1  # seconds in which the cause may follow its consequence


@dataclass
class RankProcess:
    """A rank as its supervisor knows it. ``pid`` leads the rank's process group."""

    rank: int
    pid: int
    pidfd: int
    memfd: int  # of its answer
    crash_fd: int  # of its stacks, if it crashes
    answered: bool = False
    stopped: bool = False  # told to stop, or killed, by us


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
        grace_period: float,
        clock: Callable[[], float] = time.monotonic,
        signal_group: Callable[[int, int], None] = linux.signal_group,
    ) -> None:
        self._ranks = {rank.pidfd: rank for rank in ranks}
        self._by_local_rank = list(ranks)
        self._answers = answers
        self._server: Server | None = server
        self._launcher = launcher
        self._listening = {launcher.fileno(), parent}
        self._grace_period = grace_period
        self._clock = clock
        self._signal_group = signal_group
        self._stop_at: float | None = None  # when SIGTERM is due
        self._kill_at: float | None = None  # when SIGKILL is due; set once SIGTERM was sent

    def run(self) -> None:
        while self._ranks:
            ready = {fd for fd in wait(self._sources(), self._patience()) if isinstance(fd, int)}
            self._drain()
            if self._server is not None and self._server.sentinel in ready:
                self._lose_server()
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
        return [self._answers.queue.fileno(), *self._ranks, *sentinel, *self._listening]

    def _patience(self) -> float | None:
        """Seconds until the next deadline, None if there is none."""
        due = self._kill_at if self._stopping else self._stop_at
        return None if due is None else max(0.0, due - self._clock())

    @property
    def _stopping(self) -> bool:
        return self._kill_at is not None

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
        self._signal_group(rank.pid, signal.SIGKILL)
        _, status = os.waitpid(rank.pid, 0)
        self._drain()  # an answer sent just before death counts
        exitcode = os.waitstatus_to_exitcode(status)
        phase = self._answers.phases[self._by_local_rank.index(rank)]
        record = RankGone(rank.rank, rank.pid, exitcode, phase, rank.answered, rank.stopped, self._clock())
        self._launcher.tell(record, [rank.crash_fd])
        for fd in (rank.pidfd, rank.memfd, rank.crash_fd):
            os.close(fd)
        if exitcode != 0:
            self._stop_within(0.0)

    def _lose_server(self) -> None:
        if self._server is None:
            return
        pid, exitcode = self._server.pid, self._server.reap()
        self._server = None
        self._launcher.tell(ServerGone(pid, exitcode, self._clock()))
        self._stop_within(0.0)

    def _hear(self, fd: int) -> None:
        """The launcher cancels, or the launcher or the fork server is gone."""
        self._stop_within(0.0)
        if fd != self._launcher.fileno():
            self._listening.discard(fd)
            return
        try:
            record, _ = self._launcher.receive()
        except EOFError:
            self._listening.discard(fd)
            return
        if isinstance(record, Cancel) and record.force:
            self._kill_at = self._clock()

    # Stopping

    def _stop_within(self, seconds: float) -> None:
        due = self._clock() + seconds
        self._stop_at = due if self._stop_at is None else min(due, self._stop_at)

    def _escalate(self) -> None:
        now = self._clock()
        if not self._stopping and self._stop_at is not None and now >= self._stop_at:
            self._terminate()
            self._kill_at = now + self._grace_period
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _terminate(self) -> None:
        """Asks. A rank that has answered is leaving by itself and is left to it."""
        for rank in self._ranks.values():
            if not rank.answered:
                rank.stopped = True
                self._signal_group(rank.pid, signal.SIGTERM)

    def _kill(self) -> None:
        """Forces."""
        for rank in self._ranks.values():
            rank.stopped = True
            self._signal_group(rank.pid, signal.SIGKILL)
        self._kill_at = float("inf")
