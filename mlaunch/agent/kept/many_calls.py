"""The supervisor of ranks that stay: it sends them call after call, and finds out whether they can take the next one.

    idle --next call--> running --all have answered--> idle
    running --failure, deadline, end--> asking (stacks) --> calling back (KeyboardInterrupt)
            --all have answered--> comparing numbers --they agree--> meeting --all have met--> idle

A rank that does not come back within the grace period, or whose numbers differ, is out of step with the others. So is
one, at once, that has entered an operation which another one, who is back, has not: that will never be complete. As
ranks may come to it late, all are asked again until the grace period is over. There is no way to mend it: the ranks are
stopped, as those of a failed launch are. So they are if one of them ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from mlaunch.agent.questions import Questions
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.first_step import NEVER, FirstStep
from mlaunch.agent.supervision.launch_state import OngoingCall, Supervision
from mlaunch.agent.supervision.supervisor import Supervisor
from mlaunch.protocol.channel import FD_LIMIT
from mlaunch.protocol.messages import (
    AgentHears,
    Answer,
    AnswerKind,
    Ask,
    CallOver,
    EndCall,
    EndRanks,
    Errand,
    NextCall,
    RankAnswered,
)
from mlaunch.protocol.stack_dump import STACKS_TIMEOUT
from mlaunch.rank import in_step

_LOOK_DELAY = 0.1  # seconds between looks whether ranks that were asked to stop have answered their launcher
_CHECK_TIMEOUT = 1.0  # seconds, at least, for ranks that have all come back to compare and meet


class KeptSupervisor(Supervisor):
    """Watches until the ranks are ended."""

    def __init__(self, scene: Supervision) -> None:
        super().__init__(scene)
        self._call = OngoingCall(0, None, None, released=True)  # the numbers are the launcher's
        self._grace_period = scene.grace_period
        self._board = scene.results.board
        self._numbers = NumberRequests(self._questions)
        self._were_back: list[int] = []  # ranks that had come back when all were asked: they will enter nothing more
        self._failed = False  # the call did not end by itself
        self._must_stay = True  # until the launcher asks them to leave
        self._kept_back: list[tuple[RankAnswered, list[int]]] = []
        # When each step is due.
        self._asking = FirstStep(scene.system.clock, self._stopping.a_rank_ends)
        self._call_back_at = self._lost_at = NEVER
        for rank in scene.ranks:
            rank.answer = AnswerKind.VALUE  # they are at work for nobody

    # What the launcher says

    def _obey(self, record: AgentHears | None, fds: list[int]) -> bool:
        if isinstance(record, NextCall):
            self._begin_next(record, fds)
        elif isinstance(record, EndCall):
            if record.number == self._call.number:
                self._end_callers(record)
        elif isinstance(record, EndRanks):
            self._must_stay = False
            # One may have answered its launcher a moment ago and not be back yet: it leaves by itself, too.
            self._stopping.without_asking(force=False, spare_leaving=True)
        else:
            return False
        return True

    def _begin_next(self, record: NextCall, fds: list[int]) -> None:
        if not self._lacks_ranks():  # else its caller will hear of it
            due = None if record.deadline is None else self._clock() + record.deadline
            self._failed = False
            self._parts.over()
            self._begin(OngoingCall(record.number, record.deadline, due), record.data, fds[0] if fds else None)
        for fd in fds:
            os.close(fd)

    def _catch_up(self) -> None:
        number = self._board.call
        if number > self._call.number:
            self._parts.over()
            self._call, self._failed = OngoingCall(number, None, None, from_launcher=True), False
            for rank in self._by_local_rank:
                rank.expect(answered=False)
        if self._call.from_launcher and not self._call.released:
            for rank in self._by_local_rank:
                if rank.answer is None and self._board.answered(rank.local_rank) == number:
                    rank.expect(answered=True)

    def _end_callers(self, asked: EndCall) -> None:
        """Ends the call as its launcher asks; one that is over already is only said to be so."""
        if self._call.released:
            self._launcher.try_send(CallOver(asked.number))
        elif asked.late is not None:  # as if we had kept it
            self._call.deadline, self._call.due = asked.late, self._clock()
        else:
            self._end_call(0.0)

    # How a call ends

    def _pass_on(self, answer: Answer) -> None:
        if self._call.errand is Errand.RUN:
            super()._pass_on(answer)
        else:
            self._by_local_rank[answer.local_rank].take(answer)

    def _forward(self, rank: RankProcess, record: RankAnswered) -> None:
        """Keeps values until all are there, so that the launcher is woken once; but not beside a failure."""
        if rank.content.memfd >= 0:  # before the launcher can send the next call
            rank.give_answer_file()
        self._kept_back.append((record, rank.content.fds()))
        if record.kind is not AnswerKind.VALUE or self._failed or self._call.from_launcher:
            self._send_answers()

    def _send_answers(self, *, but: int = 0) -> None:
        """Sends what was kept, but for the last ``but`` answers."""
        sent = self._kept_back[: len(self._kept_back) - but]
        for record, fds in sent:
            self._launcher.try_send(record, fds)
        del self._kept_back[: len(sent)]

    def _reap(self, rank: RankProcess) -> None:
        self._failed = True  # from now on answers are forwarded at once, while their descriptors are there
        self._send_answers()
        super()._reap(rank)

    def _release(self) -> None:
        """Takes the next step, once all have answered."""
        if self._lacks_ranks() or self._call.released or any(rank.working for rank in self._ranks.values()):
            return
        self._call.released = True
        self._forget_steps()
        self._numbers.clear()
        if not self._failed:
            self._finish()
        elif self._call.errand is Errand.RUN:
            self._send_on(Errand.TELL_NUMBERS)
        elif any(rank.answer is not AnswerKind.VALUE for rank in self._by_local_rank):
            self._lose()
        elif self._call.errand is Errand.TELL_NUMBERS:
            self._compare([rank.content.read() for rank in self._by_local_rank])
        else:
            self._finish()

    def _lacks_ranks(self) -> bool:
        """Tells whether the end has begun, or is about to since a rank is gone."""
        return self._stopping.begun or len(self._ranks) < len(self._by_local_rank)

    def _compare(self, told: Sequence[in_step.Numbers]) -> None:
        """Lets the ranks meet if what they have told says that they are in step."""
        if in_step.agree(told):
            self._send_on(Errand.MEET)
        else:
            self._lose()

    def _finish(self) -> None:
        self._stopping.end_call()
        self._call.due = None  # it could only be taken for the next call's
        self._parts.over()
        if self._inspection is not None:
            self._inspection.end_request()
        # As many as one record takes descriptors of go with CallOver, so that the launcher wakes once.
        self._send_answers(but=FD_LIMIT)
        answers = tuple(record for record, _ in self._kept_back)
        fds = [fd for _, fds in self._kept_back for fd in fds]
        self._kept_back.clear()
        if self._failed or not self._call.from_launcher:  # else it knows
            self._launcher.try_send(CallOver(self._call.number, answers), fds)

    def _send_on(self, errand: Errand) -> None:
        self._lost_at = self._clock() + max(self._grace_period, _CHECK_TIMEOUT)
        self._begin(OngoingCall(self._call.number, None, None, errand=errand))

    def _end_call(self, delay: float) -> None:
        if self._call.errand is Errand.RUN and not self._call.released:
            self._send_answers()
            first, self._failed = not self._failed, True
            if first or self._asking.at < NEVER:
                self._asking.within(delay)

    # The steps that end it

    def _timeout(self) -> float | None:
        due = min(self._asking.at, self._call_back_at, self._lost_at)
        if self._call.from_launcher and self._parts.look_for_answers:  # who is not told that ranks have answered it
            due = min(due, self._clock() + _LOOK_DELAY)
        ours = None if due == NEVER else max(0.0, due - self._clock())
        return min((one for one in (super()._timeout(), ours) if one is not None), default=None)

    def _take_steps(self) -> None:
        if self._stopping.begun:  # which has steps of its own
            self._forget_steps()
        now = self._clock()
        asked = self._stopping.waits or self._numbers.pending
        if self._asking.is_due():
            self._ask()
        elif self._call_back_at < NEVER and (not asked or now >= self._call_back_at):
            self._call_back()
        if now >= self._lost_at:
            self._lose()
        super()._take_steps()

    def _ask(self) -> None:
        """Asks those who still work for their stacks, and all where they are."""
        self._were_back = [rank.rank for rank in self._by_local_rank if not rank.working]
        self._numbers.ask(self._call.number)
        self._asking.clear()
        self._call_back_at = self._clock() + STACKS_TIMEOUT
        self._stopping.ask_stacks([rank for rank in self._ranks.values() if rank.working])

    def _call_back(self) -> None:
        """Raises KeyboardInterrupt in those who still work, once; stops all if somebody works in vain."""
        if self._waits_in_vain(self._were_back):
            self._lose(force=False)
            return
        self._asking.within(STACKS_TIMEOUT)
        self._call_back_at = NEVER
        self._lost_at = min(self._lost_at, self._clock() + self._grace_period)
        self._stopping.asked.clear()
        for rank in self._ranks.values():
            if rank.working:
                self._launcher.try_send(self._stopping.stacks_of(rank))
                # The number before the signal: a rank that begins a call looks at the board, so a signal too early is
                # not lost.
                self._board.stop(rank.local_rank, self._call.number)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGINT)

    def _waits_in_vain(self, back: Sequence[int]) -> bool:
        """Tells whether somebody works on what those who are back will never enter."""
        return in_step.is_lost(self._numbers.told, back)

    def _lose(self, *, force: bool = True) -> None:
        """Stops the ranks, which are out of step. ``force``: they have had their grace period."""
        self._forget_steps()
        self._stopping.without_asking(force=force, spare_leaving=True)

    def _forget_steps(self) -> None:
        self._asking.clear()
        self._call_back_at = self._lost_at = NEVER


class NumberRequests:
    """Asks ranks which operations they have entered while they may be inside one, where no call reaches them.

    A thread of each answers, if the rank lets it run.
    """

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._asked: set[int] = set()  # numbers of the questions that are open
        self._told: dict[int, in_step.Numbers] = {}  # by global rank

    @property
    def pending(self) -> bool:
        """Whether somebody has not answered."""
        return bool(self._asked & self._questions.open)

    def ask(self, call: int) -> None:
        """Asks all ranks."""
        self.clear()
        ranks = self._questions.ranks()
        self._asked = {self._questions.ask(rank, Ask.NUMBERS, self._take, call) for rank in ranks}

    def _take(self, rank: int, numbers: in_step.Numbers) -> None:
        self._told[rank] = numbers

    @property
    def told(self) -> Mapping[int, in_step.Numbers]:
        """What has been told, by global rank."""
        return self._told

    def clear(self) -> None:
        """Forgets what was asked and told."""
        for number in self._asked:
            self._questions.drop(number)
        self._asked, self._told = set(), {}
