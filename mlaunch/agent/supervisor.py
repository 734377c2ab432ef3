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
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from mlaunch.agent.evidence import Evidence
from mlaunch.agent.inspection import Inspection
from mlaunch.agent.peers import FAREWELL, Others
from mlaunch.agent.ranks import RankProcess, StackRequests
from mlaunch.base import linux
from mlaunch.base.errors import RankFailure
from mlaunch.protocol import error_file, failures, payload, stack_dump
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import (
    CAUSE_PATIENCE,
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
from mlaunch.protocol.results import Answers
from mlaunch.rendezvous.store import HostedServer

_TEXT_LIMIT = 32_768  # characters of a rank's stacks; a record is small


@dataclass(frozen=True)
class Limits:
    """In seconds. ``deadline``: for the whole call, None = no limit."""

    grace_period: float
    deadline: float | None = None


@dataclass(frozen=True)
class System:
    """What the supervisor has of the world. ``request`` asks for stacks; False: that rank cannot answer."""

    clock: Callable[[], float] = time.monotonic
    group: Callable[[int, int], None] = linux.signal_group
    request: Callable[[int, Phase], bool] = stack_dump.request


@dataclass(frozen=True)
class Scene:
    """Who else is there: those who look at this launch, and its other machines."""

    inspection: Inspection | None = None
    others: Others = field(default_factory=Others)


class Agent:
    """Supervises ``ranks`` until all are reaped. ``parent``: a pidfd of the process that must outlive us."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        answers: Answers,
        server: HostedServer | None,
        launcher: Channel,
        parent: int,
        *,
        limits: Limits,
        system: System | None = None,
        scene: Scene | None = None,
    ) -> None:
        self._ranks = {rank.pidfd: rank for rank in ranks}
        self._by_local_rank = list(ranks)
        self._answers = answers
        self._server = server
        self._launcher = launcher
        self._listening = {launcher.fileno(), parent}
        self._limits = limits
        self._system = system or System()
        self._clock = self._system.clock
        # When each step is due; None: not at all, or done.
        self._deadline_at = None if limits.deadline is None else self._clock() + limits.deadline
        self._ask_at: float | None = None
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._stopping = False  # the first step has been taken
        self._number = signal.SIGTERM  # which asks them to end
        self._spare_leaving = True  # a rank that has answered is leaving by itself, and is left to it
        self._evidence = Evidence()
        self._asked = StackRequests(self._system.request)
        scene = scene or Scene()
        self._inspection = scene.inspection
        self._others = scene.others
        self._first: RankFailure | None = None  # our first failure, for the others
        self._farewell_at: float | None = None  # when we no longer wait for the others to hear of it

    def run(self) -> None:
        while self._ranks or self._awaits_others():
            ready = {fd for fd in wait(self._sources(), self._patience()) if isinstance(fd, int)}
            self._drain()
            if self._server is not None and self._server.sentinel in ready:
                self._lose_server()
            self._asked.read(ready)
            for pidfd in ready & set(self._ranks):
                self._reap(self._ranks.pop(pidfd))
            if not any(rank.working for rank in self._ranks.values()):
                self._answers.dismiss()
            for fd in ready & self._listening:
                self._hear(fd)
            self._hear_others(ready)
            self._escalate()
            if self._inspection is not None:
                self._inspection.serve(ready, self._asked)
        if self._server is not None:
            self._server.kill()
        linux.kill_children(set() if self._server is None else {self._server.pid})  # the fork server reaps that one

    # What is waited for

    def _sources(self) -> list[int]:
        sentinel = [] if self._server is None else [self._server.sentinel]
        visitors = [*self._others.fds(), *(() if self._inspection is None else self._inspection.fds())]
        ours = [self._answers.queue.fileno(), *self._asked.fds(), *sentinel, *visitors]
        return [*ours, *self._ranks, *self._listening]

    def _patience(self) -> float | None:
        """Seconds until the next step is due, None if none is."""
        visit = self._inspection.due if self._inspection is not None else None
        steps = (self._deadline_at, self._ask_at, self._terminate_at, self._kill_at, self._farewell_at, visit)
        due = [step for step in steps if step is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    # What happens

    def _drain(self) -> None:
        for answer in self._answers.queue.drain():
            self._pass_on(answer)

    def _pass_on(self, answer: Answer) -> None:
        rank = self._by_local_rank[answer.local_rank]
        rank.answer = answer.kind
        record = RankAnswered(rank.rank, rank.pid, answer.kind, answer.consequence, self._clock())
        self._launcher.tell(record, [rank.memfd])
        if answer.kind is not Kind.VALUE:
            self._remember(lambda: failures.of_answer(record, payload.read(rank.memfd)))
            self._stop_within(CAUSE_PATIENCE if answer.consequence else 0.0)

    def _reap(self, rank: RankProcess) -> None:
        # Its group goes while the dead leader still holds the number, so that no other group can be hit.
        self._system.group(rank.pid, signal.SIGKILL)
        _, status, usage = os.wait4(rank.pid, 0)
        self._drain()  # an answer sent just before death counts
        exitcode = os.waitstatus_to_exitcode(status)
        error_file.keep(rank.error_file if exitcode else "", rank.crash_fd)
        record = RankGone(
            rank=rank.rank,
            pid=rank.pid,
            exitcode=exitcode,
            phase=self._answers.board[rank.local_rank],
            answered=rank.answer is not None,
            stopped=rank.stopped,
            at=self._clock(),
            hints=() if rank.stopped else self._evidence.hints(exitcode, usage.ru_maxrss * 1024),
            peak_memory=usage.ru_maxrss * 1024,
        )
        self._launcher.tell(record, [rank.crash_fd])
        if exitcode == 0:
            self._others.keep(rank.rank, rank.memfd if rank.answer is Kind.VALUE else None)
        elif not rank.stopped and rank.answer in {None, Kind.VALUE}:  # else it has told why
            self._remember(lambda: failures.of_end(record))
        rank.gone = True
        self._asked.forget(rank)
        for fd in (rank.pidfd, rank.memfd, rank.crash_fd, rank.stack_fd):
            os.close(fd)
        if exitcode != 0:
            self._stop_within(0.0)

    def _lose_server(self) -> None:
        if self._server is None:
            return
        pid, exitcode = self._server.pid, self._server.reap()
        self._server = None
        self._launcher.tell(ServerGone(pid, exitcode, self._clock()))
        self._remember(lambda: failures.of_server(pid, exitcode, self._clock()))
        self._stop_within(0.0)

    def _hear(self, fd: int) -> None:
        """The launcher cancels, or the launcher or the fork server is gone."""
        try:
            record = self._launcher.receive()[0] if fd == self._launcher.fileno() else None
        except EOFError:
            record = None
        if record is None:
            self._listening.discard(fd)
        self._remember(lambda: failures.of_cancel(fd == self._launcher.fileno(), by_choice=record is not None))
        force = False
        if isinstance(record, Cancel):
            force, self._number = record.force, signal.Signals(record.number)
        if record is not None and not force:
            self._stop_within(0.0)
            return
        self._spare_leaving = False
        self._terminate()  # nobody is left to hear of stacks
        due = self._clock() + (0.0 if force else self._limits.grace_period)
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    # The other machines

    def _remember(self, tell: Callable[[], RankFailure]) -> None:
        """For the others, if there are any: the first failure here, or the first that is no consequence."""
        if not self._others.awaited or (self._first is not None and not self._first.consequence):
            return
        failure = tell()
        if self._first is None or not failure.consequence:
            self._first = failure

    def _tell_others(self) -> None:
        if self._first is not None:
            self._others.tell(self._first)

    def _hear_others(self, ready: set[int]) -> None:
        failure = self._others.hear(ready, self._launcher)
        if failure is not None:
            self._launcher.tell(failure)
            self._stop_within(0.0)

    def _awaits_others(self) -> bool:
        """Our ranks are gone, and the others' may not be. After a failure they need no longer than to hear of it."""
        self._others.finish()
        if self._stopping and self._farewell_at is None:
            self._tell_others()
            self._farewell_at = self._clock() + FAREWELL
        late = self._farewell_at is not None and self._clock() >= self._farewell_at
        return self._others.awaited and not late

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
            self._spare_leaving = False
            self._launcher.tell(DeadlinePassed())
            self._remember(lambda: failures.of_deadline(self._limits.deadline))
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
        self._tell_others()
        self._terminate_at = self._clock() + stack_dump.PATIENCE
        for rank in self._working():
            self._asked.ask(rank, self._answers.board[rank.local_rank])

    def _terminate(self) -> None:
        """Asks to end."""
        self._stopping, self._ask_at, self._deadline_at, self._terminate_at = True, None, None, None
        self._asked.clear()
        self._tell_others()
        for rank in self._working():
            state = stack_dump.state_of(rank.pid)
            record = RankStacks(rank.rank, self._answers.board[rank.local_rank], state, rank.stacks[-_TEXT_LIMIT:])
            self._launcher.tell(record)
            rank.stopped = True
            self._system.group(rank.pid, self._number)
        self._answers.dismiss()

    def _working(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.working or self._is_late(rank)]

    def _is_late(self, rank: RankProcess) -> bool:
        """It has answered, but does not end. One that only waits to be dismissed has had no time to."""
        waits = self._answers.board[rank.local_rank] is Phase.RETURNED
        return rank.alive and not waits and not self._spare_leaving

    def _kill(self) -> None:
        """Forces."""
        for rank in self._ranks.values():
            rank.stopped = True
            self._system.group(rank.pid, signal.SIGKILL)
        self._kill_at = None
