"""Ends the ranks, in steps: ask for their stacks, ask them to end, force them.

    running --first failure, deadline, cancel--> asking (stacks) --> stopping (SIGTERM) --grace period--> killing
    all have answered --grace period, deadline-----^

A first failure that looks like the consequence of another rank's is held for a moment, so that the ranks that are
about to tell the cause are still there to tell it (``first_step.py``). A lost launcher or fork server skips the asking.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping

from mlaunch.agent.entered import EnteredRequests
from mlaunch.agent.questions import Questions
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.early_ends import Endings
from mlaunch.agent.supervision.first_step import NEVER, FirstStep
from mlaunch.agent.supervision.launch_state import Supervision
from mlaunch.agent.supervision.stack_requests import StackRequests, state_of
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.text import last_bytes
from mlaunch.protocol.channel import TEXT_LIMIT
from mlaunch.protocol.messages import CAUSE_DELAY, Operations, Phase, RankStacks
from mlaunch.protocol.stack_dump import STACKS_TIMEOUT, is_whole

_LEAVING_TIMEOUT = 5.0  # seconds, at least, in which ranks that have all answered end: they run exit handlers
_MOST_MEMBERS = 2000  # of a rank's groups, that a record carries beside its stack


class Stopping:
    """Knows which step is due when.

    ``ranks``: those that are not reaped, by pidfd. ``on_begin`` is called when the end begins.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankProcess],
        scene: Supervision,
        questions: Questions,
        on_begin: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._board = scene.results.board
        self._launcher = scene.launcher
        self._grace_period = scene.grace_period
        self._system = system = scene.system
        self._questions = questions
        self._on_begin = on_begin
        # When each step is due; None: not at all, or done.
        self._asking = FirstStep(system.clock, self.a_rank_ends)
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._leave_by: float | None = None
        self.of_leaving = False  # it ends ranks that have all answered, which costs nothing
        self.begun = False  # the first step has been taken
        self.asked = StackRequests(system.request, system.clock)
        self.endings = Endings(ranks, system)
        self._entered: EnteredRequests | None = None  # what ranks have entered, if that is to be told
        self._number: int = signal.SIGTERM  # which asks them to end
        self._ignored = scene.callers_signals  # signals of which ranks hear by the caller alone
        self._spares_leaving = True  # ranks that have answered are not signalled: they exit by themselves

    def due(self) -> list[float]:
        """Returns when its steps are due."""
        asking = None if self._asking.at == NEVER else self._asking.at
        steps = (asking, self._terminate_at, self._kill_at, self._leave_by, self.endings.due)
        return [step for step in steps if step is not None]

    def fds(self) -> list[int]:
        """Returns what ``hear`` wants to hear of."""
        return [*self.asked.fds(), *self.endings.fds()]

    def hear(self, ready: Collection[int]) -> None:
        """Takes in stacks, and that a rank has begun to end by failure."""
        self.asked.read(ready)
        if self.endings.hear(ready):
            self.within(0.0)

    def within(self, seconds: float) -> None:
        """Begins after that time, at the latest."""
        if not self.begun:
            self._asking.within(seconds)

    def without_asking(self, *, force: bool, spare_leaving: bool = False) -> None:
        """Begins at once, with the request to end: nobody is left to hear of stacks. ``force``: without grace."""
        self._spares_leaving = spare_leaving
        self._terminate()
        due = self._system.clock() + (0.0 if force else self._grace_period)
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def cancel(self, number: int, *, force: bool) -> None:
        """Begins as the launcher asks, whose signal the ranks get. ``force``: without asking for stacks, or grace."""
        self._number = number
        self.of_leaving = self.of_leaving or self._leave_by is not None
        if force:
            self.without_asking(force=True)
        else:
            self.within(0.0)

    def spare_nobody(self) -> None:
        """Takes in that ranks which have answered are to be ended, too, if they do not leave."""
        self._spares_leaving = False

    def expect_ends(self) -> None:
        """Takes in that all ranks have answered, and that those which do not end in time are to be ended."""
        if not self.begun:
            self._leave_by = self._system.clock() + max(self._grace_period, _LEAVING_TIMEOUT)

    def end_leaving(self) -> None:
        """Ends ranks that have all answered and have not ended. No failure is told of."""
        self._leave_by = None
        if not self.begun:
            self.of_leaving = True
            self.within(0.0)

    def end_call(self) -> None:
        """Takes in that a call is over on ranks that stay: what its deadline has changed is as before."""
        self._spares_leaving, self._entered = True, None
        self.asked.clear()

    def take_steps(self) -> None:
        """Takes the steps that are due, in their order."""
        now = self._system.clock()
        if self._leave_by is not None and now >= self._leave_by:
            self.end_leaving()
        if self._asking.is_due():
            self._ask()
        # All at one go, once all stacks are there: the end of one rank breaks the connections of the next.
        if self._terminate_at is not None and (not self.waits or now >= self._terminate_at):
            self._terminate()
            self._kill_at = now + self._grace_period
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def follow(self, failure: RankFailure) -> None:
        """Takes in that another machine has failed. Of a deadline the report tells who waits for whom, on all."""
        if failure.final:
            self.explain()
        self.within(CAUSE_DELAY if failure.consequence else 0.0)

    def explain(self) -> None:
        """Takes in that a deadline has passed: nobody is spared, and all are asked what they have entered."""
        self.spare_nobody()
        self._entered = EnteredRequests(self._questions)
        self._entered.ask()

    @property
    def waits(self) -> bool:
        """Whether ranks have been asked something, and have not told it all."""
        return bool(self.asked) or (self._entered is not None and self._entered.pending)

    def _ask(self) -> None:
        """Asks for their stacks, before they are stopped."""
        self._begin()
        # A rank in C code that holds the interpreter lock answers, too (a signal handler in C), but not one that is
        # stopped.
        self._terminate_at = self._system.clock() + STACKS_TIMEOUT
        self.ask_stacks(self._working())

    def ask_stacks(self, ranks: Iterable[RankProcess]) -> None:
        """Asks ranks for their stacks, and ends nothing."""
        for rank in ranks:
            self.asked.ask(rank, self._board[rank.local_rank])

    def _terminate(self) -> None:
        """Asks to end; ranks that wait for the others need not any more."""
        self._begin()
        self._terminate_at = None
        self.asked.clear()
        working = self._working()
        # Read before the signals: afterwards the ranks are where their handlers are.
        stacks = [self.stacks_of(rank) for rank in working]
        for rank in working:  # at one go: the end of one would be "Connection closed by peer" to the next
            rank.stopped = True
            self._signal(rank, self.heard(self._number))
        for record in stacks:
            self._launcher.try_send(record)
        for rank in self._ranks.values():
            rank.release()

    def _kill(self) -> None:
        """Forces them to end."""
        for rank in self._ranks.values():
            if rank.ends_at is None:  # else it ends by itself, and is why the others are stopped
                rank.stopped = True
                self._system.process(rank.pid, signal.SIGKILL)  # what it has started is ended later
        self._kill_at = None

    def heard(self, number: int) -> int:
        """Returns this signal, or another that asks ranks to end which ignore it."""
        asking = (number, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        return next((one for one in asking if one not in self._ignored), signal.SIGKILL)

    def _signal(self, rank: RankProcess, number: int) -> None:
        # In this order: one that has just been forked may become its group's leader in between.
        self._system.stray(rank.pid, rank.pidfd, number)
        self._system.group(rank.pid, number)

    def _begin(self) -> None:
        self.begun, self._leave_by = True, None
        self._asking.clear()
        self.endings.close()
        self._on_begin()

    def a_rank_ends(self) -> bool:
        """Tells whether one that has not answered is about to end."""
        return any(self._system.is_ending(rank.pid, self._board[rank.local_rank]) for rank in self._working())

    def stacks_of(self, rank: RankProcess) -> RankStacks:
        """Returns what it has told of them."""
        text = last_bytes(rank.stacks, TEXT_LIMIT)
        state = "" if is_whole(text) else state_of(rank.pid)
        entered = None if self._entered is None else self._entered.told.get(rank.rank)
        if entered is not None and sum(len(group.members) for group in entered.groups) > _MOST_MEMBERS:
            entered = Operations()
        return RankStacks(rank.rank, self._board[rank.local_rank], state, text, entered)

    def _working(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.working or self._is_late(rank)]

    def _is_late(self, rank: RankProcess) -> bool:
        """True for a rank that answered, was released and still has not exited."""
        waits = self._board[rank.local_rank] in {Phase.RETURNED, Phase.IDLE}
        return rank.alive and (self.of_leaving or not (waits or self._spares_leaving))
