"""The end of the ranks, in steps: ask for their stacks, ask them to end, force them.

    running --first failure, deadline, cancel--> asking (stacks) --> stopping (SIGTERM) --grace period--> killing
    all have answered --grace period, deadline-----^

A lost launcher or fork server skips the asking.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from mlaunch.agent.questions import EnteredRequests, Questions
from mlaunch.agent.rank_process import RankProcess, StackRequests, state_of
from mlaunch.base.deadline import NEVER
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.fds import close_all
from mlaunch.base.frames import STACKS_TIMEOUT, STARVED_TIMEOUT, is_whole_stack
from mlaunch.base.text import last_bytes
from mlaunch.protocol.channel import TEXT_LIMIT
from mlaunch.protocol.messages import CAUSE_DELAY, Operations, Phase, RankStacks

if TYPE_CHECKING:
    from mlaunch.agent.supervision import Supervision, System

_LEAVING_TIMEOUT = 5.0  # seconds, at least, in which ranks that have all answered end: they run exit handlers
_MOST_MEMBERS = 2000  # of a rank's groups, that a record carries beside its stack
END_DELAY = 2.0  # seconds in which a rank that is about to end may do so
WATCH_DELAY = 0.05  # seconds into a call: shorter ones are spared the work
_FEW = 64  # ranks whose threads are watched: each costs two descriptors


class Escalation:
    """The steps to an end: ask ranks where they are, ask them to end what they do, force it. ::

        within() --> ask --they have told, or STACKS_TIMEOUT--> request --grace period--> force

    A rank that the system has hardly run since it was asked (``starved``) has up to STARVED_TIMEOUT: it can answer, and
    a report without the place of a rank on a busy machine is the one that is needed most.

    One instance ends a launch (stacks, SIGTERM, SIGKILL). Another ends a call on ranks that stay (``ranks/agent.py``:
    stacks and numbers, SIGINT, the end of the launch). Failures, deadlines and stops all begin it. ``waits``: ranks
    have not told all that they were asked.

    A failure that looks like the consequence of another rank's holds the first step for a moment, so that the ranks
    that are about to tell the cause are still there to tell it. If a rank is about to end then (``a_rank_ends``),
    that end is the cause, most likely, and is worth a longer wait, once: the kernel closes the connections of a process
    before it tells that the process has ended, and on a busy machine long before.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        grace_period: float,
        *,
        a_rank_ends: Callable[[], bool],
        ask: Callable[[], None],
        waits: Callable[[], bool],
        starved: Callable[[], bool],
        request: Callable[[], None],
        force: Callable[[], None],
    ) -> None:
        self._clock, self._grace_period, self._a_rank_ends = clock, grace_period, a_rank_ends
        self._ask, self._waits, self._request, self._force = ask, waits, request, force
        self._starved = starved
        # When each step is due.
        self._ask_at = self._request_at = self._force_at = NEVER
        self._request_by = NEVER  # whatever starves
        self._longer = END_DELAY

    @property
    def will_ask(self) -> bool:
        """True if the first step is still to come."""
        return self._ask_at < NEVER

    def due(self) -> float:
        """Return when the next step is due."""
        return min(self._ask_at, self._request_at, self._force_at)

    def within(self, seconds: float) -> None:
        """Ask within that time; 0.0: whatever a rank is about to do, as the cause is known."""
        self._ask_at = min(self._ask_at, self._clock() + seconds)
        self._longer = self._longer if seconds else 0.0

    def force_in(self, seconds: float) -> None:
        """Force the end after this time, unless ``clear`` is called before."""
        self._force_at = self._clock() + seconds

    def skip_asking(self) -> None:
        """Take no first step, or not again."""
        self._ask_at, self._longer = NEVER, END_DELAY

    def clear(self) -> None:
        """Take no step: the end has come, or is another's business."""
        self.skip_asking()
        self._request_at = self._force_at = NEVER

    def take_steps(self) -> None:
        """Take the steps that are due, in their order."""
        now = self._clock()
        if now >= self._ask_at and not self._puts_off(now):
            self.skip_asking()
            self._request_at, self._request_by = now + STACKS_TIMEOUT, now + STARVED_TIMEOUT
            self._ask()
        if self._request_at < NEVER and not self._waits_longer(now):
            self.request(self._grace_period)
        if now >= self._force_at:
            self._force_at = NEVER
            self._force()

    def request(self, grace_period: float) -> None:
        """Take the second step now, and the third after these seconds at the latest."""
        self._request_at = NEVER
        self._force_at = min(self._force_at, self._clock() + grace_period)
        self._request()

    def _waits_longer(self, now: float) -> bool:
        """True if the second step waits for answers. It is put off for a rank that gets no CPU."""
        if not self._waits():
            return False
        if self._request_at <= now < self._request_by and self._starved():
            self._request_at = min(now + STACKS_TIMEOUT, self._request_by)
        return now < self._request_at

    def _puts_off(self, now: float) -> bool:
        """True if the first step is put off for a rank that is about to end."""
        if not self._longer or not self._a_rank_ends():
            return False
        self._ask_at, self._longer = now + self._longer, 0.0
        return True


class Endings:
    """A watch for ranks that end by failure, before they have ended. ``ranks``: those not reaped, by pidfd.

    The kernel reports the end of a process when its memory is gone and its files are closed, 3 ms after a rank was
    killed. Before that, the others have seen their connections close, and each of them describes that. The end of a
    *thread* is reported at once (Linux 6.9 or later). The threads of a killed process end within microseconds, except
    the last one, which frees the memory. So two threads of each rank are watched, one of which is not the last.
    """

    def __init__(self, ranks: Mapping[int, RankProcess], system: System) -> None:
        self._ranks = ranks
        self._system = system
        self._watched: dict[int, RankProcess] = {}  # by the pidfd of a thread
        self.due = NEVER  # when ``hear`` begins to watch; ``NEVER``: it has begun, or does not

    def watch_soon(self) -> None:
        """Start to watch in a moment, in ``hear``."""
        self.due = self._system.clock() + WATCH_DELAY

    def fds(self) -> list[int]:
        return list(self._watched)

    def hear(self, ready: Collection[int]) -> bool:
        """Return True if a rank that has not answered has begun to end by failure, and mark that rank."""
        if self.due < NEVER and self._system.clock() >= self.due:
            self._watch()
        failing = False
        # From SIGKILL of 1 of 8 ranks on 2 cores to the exception it takes 21 ms so instead of 30; in three of four
        # launches no other rank has seen its connections close before, and the report says where all of them were.
        for thread in self._watched.keys() & set(ready):
            rank = self._watched.pop(thread)
            os.close(thread)
            # A thread may end while its process continues, and a rank may end well: the process's status tells.
            if rank.working and self._system.is_failing(rank.pid):
                rank.ends_at, failing = self._system.clock(), True
        return failing

    def close(self) -> None:
        """Stop watching: all ranks are about to end."""
        self.due = NEVER
        close_all(list(self._watched))
        self._watched.clear()

    def _watch(self) -> None:
        self.due = NEVER
        if len(self._ranks) <= _FEW:
            with contextlib.suppress(OSError):  # no /proc, a rank that has just ended
                for rank in self._ranks.values():
                    self._watched.update((thread, rank) for thread in self._system.watch(rank.pid))


class Stopping:
    """The steps that end a launch.

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
        self.asked = StackRequests(system.request, system.clock)
        self._escalation = Escalation(
            system.clock, scene.grace_period, a_rank_ends=self.a_rank_ends,
            ask=self._ask, waits=self.waits, starved=self.asked.starved, request=self._terminate, force=self._kill,
        )  # fmt: skip
        self._questions = questions
        self._on_begin = on_begin
        self._leave_by = NEVER  # when ranks that have all answered are to have ended
        self.of_leaving = False  # it ends ranks that have all answered, which costs nothing
        self.begun = False  # the first step has been taken
        self.endings = Endings(ranks, system)
        self._entered: EnteredRequests | None = None  # what ranks have entered, if that is to be told
        self._number: int = signal.SIGTERM  # which asks them to end
        self._ignored = scene.callers_signals  # signals that ranks get only from the caller
        self._spares_leaving = True  # ranks that have answered are not signalled: they exit by themselves

    def due(self) -> float:
        """Return when its next step is due."""
        return min(self._escalation.due(), self._leave_by, self.endings.due)

    def fds(self) -> list[int]:
        """Return the descriptors that ``hear`` reads."""
        return [*self.asked.fds(), *self.endings.fds()]

    def hear(self, ready: Collection[int]) -> None:
        """Take stacks that have come; begin if a rank has begun to end by failure."""
        self.asked.read(ready)
        if self.endings.hear(ready):
            self.within(0.0)

    def within(self, seconds: float) -> None:
        """Begin after that time, at the latest."""
        if not self.begun:
            self._escalation.within(seconds)

    def without_asking(self, *, force: bool, spare_leaving: bool = False) -> None:
        """Begin at once with the request to end, since nobody is left to read stacks. ``force``: without grace."""
        self._spares_leaving = spare_leaving
        self._escalation.request(0.0 if force else self._grace_period)

    def cancel(self, number: int, *, force: bool) -> None:
        """Begin as the launcher asks, whose signal the ranks get. ``force``: without asking for stacks, or grace."""
        self._number = number
        self.of_leaving = self.of_leaving or self._leave_by < NEVER
        if force:
            self.without_asking(force=True)
        else:
            self.within(0.0)

    def spare_nobody(self) -> None:
        """From now on also end ranks that have answered but do not leave."""
        self._spares_leaving = False

    def expect_ends(self) -> None:
        """From now on, as all ranks have answered, also end those that do not exit in time."""
        if not self.begun:
            self._leave_by = self._system.clock() + max(self._grace_period, _LEAVING_TIMEOUT)

    def end_leaving(self) -> None:
        """End ranks that have all answered but have not exited. This is no failure."""
        self._leave_by = NEVER
        if not self.begun:
            self.of_leaving = True
            self.within(0.0)

    def end_call(self) -> None:
        """Undo what the deadline of a call has changed: the call is over, and its ranks stay."""
        self._spares_leaving, self._entered = True, None
        self.asked.clear()

    def take_steps(self) -> None:
        """Take the steps that are due, in their order."""
        if self._leave_by < NEVER and self._system.clock() >= self._leave_by:
            self.end_leaving()
        self._escalation.take_steps()

    def follow(self, failure: RankFailure) -> None:
        """End as another machine has failed. After a deadline the report says who waits for whom, on all machines."""
        if failure.final:
            self.explain()
        self.within(CAUSE_DELAY if failure.consequence else 0.0)

    def explain(self) -> None:
        """Spare nobody, since a deadline has passed, and ask all what they have entered."""
        self.spare_nobody()
        self._entered = EnteredRequests(self._questions)
        self._entered.ask()

    def waits(self) -> bool:
        """True while ranks have not told all that they were asked."""
        return bool(self.asked) or (self._entered is not None and self._entered.pending)

    def _ask(self) -> None:
        """Ask for their stacks, before they are stopped."""
        self._begin()
        # A rank in C code that holds the interpreter lock answers, too (a signal handler in C), but not one that is
        # stopped.
        self.ask_stacks(self._working())

    def ask_stacks(self, ranks: Iterable[RankProcess]) -> None:
        """Ask ranks for their stacks, and end nothing."""
        for rank in ranks:
            self.asked.ask(rank, self._board[rank.local_rank])

    def _terminate(self) -> None:
        """Ask ranks to end; those that wait for the others need not any more.

        All at one go, once all stacks are there: the end of one rank breaks the connections of the next.
        """
        self._begin()
        self.asked.clear()
        working = self._working()
        # Read before the signals: afterwards the ranks are where their handlers are.
        stacks = [self.stacks_of(rank) for rank in working]
        for rank in working:
            rank.stopped = True
            self._signal(rank, self.heard(self._number))
        for record in stacks:
            self._launcher.try_send(record)
        for rank in self._ranks.values():
            rank.release()

    def _kill(self) -> None:
        """Force them to end."""
        for rank in self._ranks.values():
            if rank.ends_at is None:  # else it ends by itself, and is why the others are stopped
                rank.stopped = True
                self._system.process(rank.pid, signal.SIGKILL)  # what it has started is ended later

    def heard(self, number: int) -> int:
        """Return this signal; if ranks ignore it, another one that asks them to end."""
        asking = (number, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        return next((one for one in asking if one not in self._ignored), signal.SIGKILL)

    def _signal(self, rank: RankProcess, number: int) -> None:
        # In this order: one that has just been forked may become its group's leader in between.
        self._system.stray(rank.pid, rank.pidfd, number)
        self._system.group(rank.pid, number)

    def _begin(self) -> None:
        self.begun, self._leave_by = True, NEVER
        self._escalation.skip_asking()
        self.endings.close()
        self._on_begin()

    def a_rank_ends(self) -> bool:
        """True if a rank that has not answered is about to end."""
        return any(self._system.is_ending(rank.pid, self._board[rank.local_rank]) for rank in self._working())

    def stacks_of(self, rank: RankProcess) -> RankStacks:
        """Return the stacks that a rank has written, whole or not, with its state if they are not whole."""
        text = last_bytes(rank.stacks, TEXT_LIMIT)
        state = "" if is_whole_stack(text) else state_of(rank.pid)
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
