"""The supervisor of one machine's ranks: sends them calls, passes on their answers, stops all at the first failure. ::

answers, ranks' pidfds, the gate's --------+                             +--> launcher: RankAnswered, RankGone, ...
launcher's channel, fork server's pidfd ---+-> one loop; nothing polls --+--> ranks: RunCall, Release, signals
other machines, visitors, next deadline ---+        (stopping.py)        +--> other machines: the first failure
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlaunch.agent.launch_state import LaunchState
from mlaunch.agent.leftovers import Adopted
from mlaunch.agent.machine_limits import Evidence, limits_of
from mlaunch.agent.one_call import Calls
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.scene import AgentParts
from mlaunch.agent.supervision import Peers, Supervision
from mlaunch.base.deadline import NEVER
from mlaunch.base.exceptions import RankFailure
from mlaunch.protocol import failures, launch_files
from mlaunch.protocol.messages import (
    CAUSE_DELAY,
    AgentHears,
    Answer,
    AnswerKind,
    Cancel,
    DeadlinePassed,
    Errand,
    RankAnswered,
    ServerGone,
)

if TYPE_CHECKING:
    from mlaunch.machines.gate import GateProcess

_FAREWELL_TIMEOUT = 1.0  # seconds for the other machines to learn of a failure


class Supervisor:
    """The agent's loop until all ranks are reaped. ``calls`` makes what happens between calls (``one_call.py``)."""

    def __init__(self, scene: Supervision, calls: Callable[[LaunchState, AgentParts], Calls]) -> None:
        self.launch = LaunchState(scene, self._begin_stopping)
        self._ranks, self._by_local_rank = self.launch.ranks, self.launch.by_local_rank
        self._stopping, self._questions = self.launch.stopping, self.launch.questions
        self._parts = AgentParts(self.launch, self._end_for_part)
        self._results, self._server, self._launcher = scene.results, scene.server, scene.launcher
        self._said = scene.said
        self._listening = {scene.launcher.fileno(), scene.parent}
        self._inspection, self._peers = scene.inspection, scene.peers
        self._inspection.facts, self._inspection.ask = self._parts.facts, self._parts.asked
        self._system, self._clock, self._signal_group = scene.system, scene.system.clock, scene.system.group
        self._evidence = Evidence()
        self._shared = SharedFailure(scene.peers, scene.system.clock)
        self._adopted = Adopted(scene.system, self._own_children)
        self._calls = calls(self.launch, self._parts)

    def run(self) -> bool:
        """Watch the ranks to their end; return True if that came by itself, with nothing amiss."""
        for record, fds in self._said:
            self._take_word(self._launcher.fileno(), record, fds)
        while self._ranks or self._shared.is_awaited(stopping=self._fails):
            ready = set(self._system.wait(self._sources(), self._timeout()))
            # The answers before the ends: a rank that has answered and ended has not failed.
            self._drain()
            if self._server is not None and self._server.sentinel in ready:
                self._lose_server(self._server)
            self._stopping.hear(ready)
            self._questions.read(ready)
            for pidfd in ready & set(self._ranks):
                self._reap(self._ranks.pop(pidfd))
            self._adopted.reap(ready)
            if not self.launch.call.released and not any(rank.working for rank in self._ranks.values()):
                self._calls.all_answered()
            for fd in ready & self._listening:
                self._hear(fd)
            self._hear_peers(ready)
            self._check_deadline()
            self._serve(ready)
            self._calls.take_steps()
            self._stopping.take_steps()
            self._parts.take_steps(ends=self._stopping.begun)
        self._adopted.close()
        self._parts.close()
        if self._server is not None:
            self._server.kill()
        # The fork server reaps that one.
        self._system.end_children(set() if self._server is None else {self._server.pid})
        return not self._stopping.begun

    @property
    def _fails(self) -> bool:
        """True if ranks are ended because something went wrong before all had answered."""
        return self._stopping.begun and not self._stopping.of_leaving

    # What is waited for

    def _sources(self) -> list[int]:
        ours = [self._results.queue.fileno(), *self._stopping.fds(), *self._questions.fds(), *self._ranks]
        ours += [*self._adopted.fds(), *(() if self._stopping.begun else self._parts.fds()), *self._listening]
        ours += [] if self._server is None else [self._server.sentinel]
        return [*ours, *self._peers.fds(), *self._inspection.fds()]

    def _timeout(self) -> float | None:
        """Return the seconds until the next step is due, None if none is."""
        begun = self._stopping.begun
        due = min(
            NEVER if begun else self.launch.call.deadline.due, self._calls.due(), self._stopping.due(),
            self._parts.due(ends=begun), self._shared.farewell_at, self._inspection.due, self._peers.due(),
            self._adopted.due,
        )  # fmt: skip
        return None if due == NEVER else max(0.0, due - self._clock())

    # What happens

    def _own_children(self) -> list[int]:
        """Return the children whose ends others take: ranks that are not reaped, the gate, the link."""
        server = [] if self._server is None else [self._server.pid]
        return [*(rank.pid for rank in self._ranks.values()), *server, *self._peers.pids]

    def _serve(self, ready: set[int]) -> None:
        """Answer visitors, who want to know something, or to end the launch."""
        if not self._inspection.serve(ready):
            return
        for visitor, feature, word in self._inspection.take_guests():
            self._parts.welcome(feature, visitor, word)
        if self._inspection.stopped_by is not None and not self._stopping.begun:
            self._end_by(failures.from_stop(self._inspection.stopped_by), whole=True)
        elif (request := self._inspection.take_request()) is not None:
            self._parts.visited(*request)

    def _end_for_part(self, failure: RankFailure, whole: bool) -> None:
        if not self._stopping.begun:
            self._end_by(failure, whole=whole)

    def _end_by(self, failure: RankFailure, *, whole: bool) -> None:
        """End the call by a failure that is no rank's; with ``whole`` the launch."""
        self._launcher.try_send(failure)
        self._shared.remember(lambda: failure)
        if whole:
            self._stopping.within(0.0)
        else:
            self._stopping.spare_nobody()
            self._calls.end(0.0)

    def _drain(self) -> None:
        answers = self._results.queue.drain()
        self._calls.catch_up()
        for answer in answers:
            if answer.number == self.launch.call.number:  # else it comes too late
                self._take_answer(answer)

    def _take_answer(self, answer: Answer) -> None:
        rank = self._by_local_rank[answer.local_rank]
        rank.take(answer)
        if self.launch.call.errand is not Errand.RUN:  # which was ours, not the launcher's
            return
        told = (answer.kind, answer.consequence, self._clock(), answer.stale, answer.data)
        record = RankAnswered(rank.rank, rank.pid, *told)
        self._calls.forward(rank, record)
        if answer.kind is not AnswerKind.VALUE:
            self._shared.remember(lambda: failures.from_answer(record, rank.content.read()))
            self._calls.end(CAUSE_DELAY if answer.consequence else 0.0)

    def _reap(self, rank: RankProcess) -> None:
        self._calls.lose_rank()
        # Its group goes while the dead leader still holds the number, so that no other group can be hit.
        self._signal_group(rank.pid, self._stopping.heard(signal.SIGTERM))
        limits = limits_of(rank.pid)
        _, status, usage = os.wait4(rank.pid, 0)
        self._drain()  # an answer sent just before death counts
        exitcode, peak_memory = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        hints = () if rank.stopped else self._evidence.hints(exitcode, usage, limits)
        record = rank.describe_end(exitcode, self._results.board[rank.local_rank], self._clock(), peak_memory, hints)
        launch_files.copy_error_file(rank.error_file if record.exitcode else "", rank.crash_fd)
        self._launcher.try_send(record, [rank.crash_fd])
        if record.failed and not rank.stopped and rank.answer in {None, AnswerKind.VALUE}:  # else it has told why
            # After its answer it is the cause only of those that have seen it: a rank that fails by itself counts more.
            answered = rank.answer is AnswerKind.VALUE
            self._shared.remember(lambda: dataclasses.replace(failures.from_exit(record), consequence=answered))
        self._stopping.asked.forget(rank)
        self._questions.forget(rank.rank)
        rank.close()
        # The end of a rank that has answered does no harm. If others fail because of it, it is their cause.
        if (record.failed and rank.answer is not AnswerKind.VALUE) or self._calls.must_stay:
            self._stopping.within(0.0)

    def _lose_server(self, server: GateProcess) -> None:
        exitcode, self._server = server.reap(), None
        self._launcher.try_send(ServerGone(server.pid, exitcode, self._clock()))
        self._shared.remember(lambda: failures.from_server(server.pid, exitcode, self._clock()))
        self._stopping.within(0.0)

    def _hear(self, fd: int) -> None:
        """Act on a word of the launcher's, or on the end of the launcher or the fork server."""
        self._take_word(fd, *(self._launcher.hear() if fd == self._launcher.fileno() else (None, [])))

    def _take_word(self, fd: int, record: AgentHears | None, fds: list[int]) -> None:
        if (
            self._parts.hear(record, fds)
            or self._inspection.obey(record, self._launcher)
            or self._calls.hear(record, fds)
        ):
            return
        if record is None:
            self._listening.discard(fd)
        ours = [rank.rank for rank in self._by_local_rank] if self._peers.fds() else []  # others do not know them
        cancel = record if isinstance(record, Cancel) else None if record is None else Cancel()
        self._shared.remember(lambda: failures.from_cancel(fd == self._launcher.fileno(), cancel, ours))
        if not isinstance(record, Cancel):
            self._stopping.without_asking(force=False)
        else:
            self._stopping.cancel(record.number, force=record.force)

    def _check_deadline(self) -> None:
        call = self.launch.call
        if self._stopping.begun or self._clock() < call.deadline.due:
            return
        call.deadline.cancel()
        if call.released and not self._peers.awaited:
            self._stopping.end_leaving()
            return
        self._stopping.explain()
        self._launcher.try_send(DeadlinePassed())
        self._shared.remember(lambda: failures.from_deadline(call.seconds))
        self._calls.end(0.0)

    # The other machines

    def _begin_stopping(self) -> None:
        """Tell the other machines why this one stops its ranks."""
        if self._fails:
            self._shared.tell()

    def _hear_peers(self, ready: set[int]) -> None:
        news = self._peers.hear(ready)
        if isinstance(news, RankFailure):
            self._launcher.try_send(news)
            self._stopping.follow(news)
        elif news is not None:
            self._parts.hear_machines(news)


class SharedFailure:
    """The failure of this machine that it tells the other machines. ``clock`` gives monotonic seconds."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._first: RankFailure | None = None
        self.farewell_at = NEVER  # when we no longer wait for the peers to hear of it

    def remember(self, describe: Callable[[], RankFailure]) -> None:
        """Keep the first failure here, or the first that is no consequence, if there are peers."""
        if not self._peers.awaited or (self._first is not None and not self._first.consequence):
            return
        failure = describe()
        if self._first is None or not failure.consequence:
            self._first = failure

    def tell(self) -> None:
        """Tell the peers why the ranks here are stopped."""
        if self._first is not None:
            self._peers.tell(self._first)

    def is_awaited(self, *, stopping: bool) -> bool:
        """True if the peers' ranks may still be there. After a failure they are given the time to hear of it."""
        self._peers.finish()
        if stopping and self.farewell_at == NEVER:
            self.tell()
            self.farewell_at = self._clock() + _FAREWELL_TIMEOUT
        return self._peers.awaited and self._clock() < self.farewell_at
