"""The supervisor of one machine's ranks: sends them calls, passes on their answers, stops all at the first failure. ::

answers, ranks' pidfds, the gate's --------+                             +--> launcher: RankAnswered, RankGone, ...
launcher's channel, fork server's pidfd ---+-> one loop; nothing polls --+--> ranks: RunCall, Release, signals
other machines, visitors, next deadline ---+        (stopping.py)        +--> other machines: the first failure
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from mlaunch.agent.questions import Questions
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.scene import AgentParts
from mlaunch.agent.supervision.evidence import Evidence, limits_of
from mlaunch.agent.supervision.launch_state import OngoingCall, SharedFailure, Supervision
from mlaunch.agent.supervision.stopping import Stopping
from mlaunch.agent.supervision.system import System
from mlaunch.base.child_ends import ChildEnds
from mlaunch.base.exceptions import RankFailure
from mlaunch.protocol import error_file, failures
from mlaunch.protocol.channel import pickled
from mlaunch.protocol.messages import (
    CAUSE_DELAY,
    AgentHears,
    Answer,
    AnswerKind,
    Cancel,
    DeadlinePassed,
    RankAnswered,
    RunCall,
    ServerGone,
)
from mlaunch.protocol.spec import Details

if TYPE_CHECKING:
    from mlaunch.machines.gate.store_process import StoreProcess


class Supervisor:
    """Watches until all ranks are reaped. ``held``: descriptors that came with the call, which they hold, too."""

    held: tuple[int, ...] = ()

    def __init__(self, scene: Supervision) -> None:
        self._ranks = {rank.pidfd: rank for rank in scene.ranks}
        self._by_local_rank = list(scene.ranks)
        self._results, self._server, self._launcher = scene.results, scene.server, scene.launcher
        self._said = scene.said
        self._listening = {scene.launcher.fileno(), scene.parent}
        self._inspection, self._peers = scene.inspection, scene.peers
        self._system, self._clock, self._signal_group = scene.system, scene.system.clock, scene.system.group
        self._questions = Questions({one.rank: one.control for one in scene.ranks if one.control is not None})
        self._must_stay = False  # a rank that ends well is a failure all the same
        self._evidence = Evidence()
        self._call = OngoingCall(-1, None, None)
        self._shared = SharedFailure(scene.peers, scene.system.clock)
        self._stopping = Stopping(self._ranks, scene, self._questions, self._begin_stopping)
        self._parts = AgentParts(
            scene.sections, scene.ranks, self._questions, scene.launcher, scene.peers,
            clock=self._clock, call=lambda: self._call.number, fail=self._end_for_part,
        )  # fmt: skip
        self._parts.hold = lambda held: self._call.hold(self._clock(), held=held)
        if self._inspection is not None:
            self._inspection.facts, self._inspection.ask = self._parts.facts, self._parts.asked
            self._parts.status, self._parts.launch = self._inspection.status, self._inspection.launch
        self._parts.board, self._parts.stacks = scene.results.board, self._stopping.asked
        self._adopted = Adopted(scene.system, self._own_children)

    def begin_call(
        self, call_fd: int | None, deadline: float | None, left: float | None, details: Details | None = None
    ) -> None:
        """Sends a call to all ranks. ``call_fd`` None: they have it in memory. ``left``: seconds of its deadline."""
        due = None if left is None else self._clock() + left
        self._begin(OngoingCall(self._call.number + 1, deadline, due, details=details), call_fd=call_fd)
        if not self._peers.awaited:  # they are told why we stop, which is known when the rank has ended
            self._stopping.endings.watch_soon()

    def _begin(self, call: OngoingCall, data: bytes = b"", call_fd: int | None = None) -> None:
        self._call = call
        record = pickled(RunCall(call.number, call.errand, data, call_fd is not None, call.details))
        for rank in self._by_local_rank:
            rank.begin_call(record, [*self.held] if call_fd is None else [call_fd, *self.held])

    def run(self) -> bool:
        """Watches the ranks to their end; tells whether that came by itself, with nothing amiss."""
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
            self._release()
            for fd in ready & self._listening:
                self._hear(fd)
            self._hear_peers(ready)
            self._check_deadline()
            self._serve(ready)
            self._take_steps()
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
        ours += [*self._adopted.fds(), *(() if self._stopping.begun else self._parts.fds())]
        ours += [*self._listening, *([] if self._server is None else [self._server.sentinel]), *self._peers.fds()]
        return [*ours, *(() if self._inspection is None else self._inspection.fds())]

    def _timeout(self) -> float | None:
        """Returns the seconds until the next step is due, None if none is."""
        visit = self._inspection.due if self._inspection is not None else None
        steps = (None if self._stopping.begun else self._call.due, self._shared.farewell_at, visit, self._peers.due(),
                 self._adopted.due)  # fmt: skip
        due = [
            *self._stopping.due(),
            *self._parts.due(ends=self._stopping.begun),
            *(step for step in steps if step is not None),
        ]
        return max(0.0, min(due) - self._clock()) if due else None

    # What happens

    def _own_children(self) -> list[int]:
        """Returns the children whose ends others take in: ranks that are not reaped, the gate, the link."""
        server = [] if self._server is None else [self._server.pid]
        return [*(rank.pid for rank in self._ranks.values()), *server, *self._peers.pids]

    def _serve(self, ready: set[int]) -> None:
        """Answers those who have come to look, or to end the launch."""
        if self._inspection is None:
            return
        self._inspection.serve(ready)
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
        """Ends the call by a failure that is no rank's; with ``whole`` the launch."""
        self._launcher.try_send(failure)
        self._shared.remember(lambda: failure)
        if whole:
            self._stopping.within(0.0)
        else:
            self._stopping.spare_nobody()
            self._end_call(0.0)

    def _take_steps(self) -> None:
        self._stopping.take_steps()
        self._parts.take_steps(ends=self._stopping.begun)

    def _drain(self) -> None:
        answers = self._results.queue.drain()
        self._catch_up()
        for answer in answers:
            if answer.number == self._call.number:  # else it comes too late
                self._pass_on(answer)

    def _catch_up(self) -> None:
        """Reads from the board which calls were sent, and answered, directly (ranks that stay)."""

    def _pass_on(self, answer: Answer) -> None:
        rank = self._by_local_rank[answer.local_rank]
        rank.take(answer)
        told = (answer.kind, answer.consequence, self._clock(), answer.stale, answer.data)
        record = RankAnswered(rank.rank, rank.pid, *told)
        self._forward(rank, record)
        if answer.kind is not AnswerKind.VALUE:
            self._shared.remember(lambda: failures.from_answer(record, rank.content.read()))
            self._end_call(CAUSE_DELAY if answer.consequence else 0.0)

    def _forward(self, rank: RankProcess, record: RankAnswered) -> None:
        self._launcher.try_send(record, rank.content.fds())

    def _end_call(self, delay: float) -> None:
        """Ends the call, within that time at the latest."""
        self._stopping.within(delay)

    def _release(self) -> None:
        """Lets ranks go that have answered, once nobody is left who works with them."""
        if not self._call.released and not any(rank.working for rank in self._ranks.values()):
            self._call.released = True
            self._stopping.endings.close()
            self._stopping.expect_ends()
            for rank in self._ranks.values():
                rank.release()

    def _reap(self, rank: RankProcess) -> None:
        # Its group goes while the dead leader still holds the number, so that no other group can be hit.
        self._signal_group(rank.pid, self._stopping.heard(signal.SIGTERM))
        limits = limits_of(rank.pid)
        _, status, usage = os.wait4(rank.pid, 0)
        self._drain()  # an answer sent just before death counts
        exitcode, peak_memory = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        hints = () if rank.stopped else self._evidence.hints(exitcode, usage, limits)
        record = rank.describe_end(exitcode, self._results.board[rank.local_rank], self._clock(), peak_memory, hints)
        error_file.copy_into(rank.error_file if record.exitcode else "", rank.crash_fd)
        self._launcher.try_send(record, [rank.crash_fd])
        if record.failed and not rank.stopped and rank.answer in {None, AnswerKind.VALUE}:  # else it has told why
            # After its answer it is the cause of those alone who have seen it: whoever fails by itself counts more.
            answered = rank.answer is AnswerKind.VALUE
            self._shared.remember(lambda: dataclasses.replace(failures.from_exit(record), consequence=answered))
        self._stopping.asked.forget(rank)
        self._questions.forget(rank.rank)
        rank.close()
        # One that has answered costs nobody anything by its end. If others fail of it, it is their cause.
        if (record.failed and rank.answer is not AnswerKind.VALUE) or self._must_stay:
            self._stopping.within(0.0)

    def _lose_server(self, server: StoreProcess) -> None:
        exitcode, self._server = server.reap(), None
        self._launcher.try_send(ServerGone(server.pid, exitcode, self._clock()))
        self._shared.remember(lambda: failures.from_server(server.pid, exitcode, self._clock()))
        self._stopping.within(0.0)

    def _hear(self, fd: int) -> None:
        """Takes in that the launcher cancels, or that the launcher or the fork server is gone."""
        self._take_word(fd, *(self._launcher.hear() if fd == self._launcher.fileno() else (None, [])))

    def _take_word(self, fd: int, record: AgentHears | None, fds: list[int]) -> None:
        if self._parts.hear(record, fds) or self._is_asked(record) or self._obey(record, fds):
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

    def _is_asked(self, record: AgentHears | None) -> bool:
        return self._inspection is not None and self._inspection.obey(record, self._launcher)

    def _obey(self, _record: AgentHears | None, _fds: list[int]) -> bool:
        """Does what a launcher asks of ranks that stay, or are prepared; False if it asks for something else."""
        return False

    def _check_deadline(self) -> None:
        if self._stopping.begun or self._call.due is None or self._clock() < self._call.due:
            return
        self._call.due = None
        if self._call.released and not self._peers.awaited:
            self._stopping.end_leaving()
            return
        self._stopping.explain()
        self._launcher.try_send(DeadlinePassed())
        self._shared.remember(lambda: failures.from_deadline(self._call.deadline))
        self._end_call(0.0)

    # The other machines

    def _begin_stopping(self) -> None:
        """Tells the peers why."""
        if self._fails:
            self._shared.tell()

    def _hear_peers(self, ready: set[int]) -> None:
        if (failure := self._peers.hear(ready)) is not None:
            self._launcher.try_send(failure)
            self._stopping.follow(failure)
        for word in self._peers.take_words():
            self._parts.hear_machines(word)


_WATCH_DELAY = 0.05  # seconds into a launch: shorter ones are spared the work


class Adopted:
    """Reaps what ranks have started and left, as it ends: the agent is the parent that such processes get.

    A rank that runs ``os.system("command &")`` at each step would fill the table of processes otherwise. ``own``: the
    children whose statuses others take.
    """

    def __init__(self, system: System, own: Callable[[], Collection[int]]) -> None:
        self._system = system
        self._own = own
        self._ends: ChildEnds | None = None
        self.due: float | None = system.clock() + _WATCH_DELAY  # when ``reap`` begins to watch; None: it does

    def fds(self) -> list[int]:
        return [] if self._ends is None else [self._ends.fileno()]

    def reap(self, ready: Collection[int]) -> None:
        """Reaps what has ended, if some child has."""
        if self.due is not None and self._system.clock() >= self.due:
            self.due, self._ends = None, self._system.child_ends()
            self._system.reap(self._own())  # those of before
        elif self._ends is not None and self._ends.fileno() in ready:
            self._ends.take()  # first: who ends from now on is heard of again
            self._system.reap(self._own())

    def close(self) -> None:
        """Watches no more."""
        self.due = None
        if self._ends is not None:
            self._ends.close()
            self._ends = None
