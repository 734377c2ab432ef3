"""Calls on ranks that stay: one after the other, if the ranks can take the next one.

    idle --next call--> running --all have answered--> idle
    running --failure, deadline, end--> asking (stacks) --> calling back (KeyboardInterrupt)
            --all have answered--> comparing numbers --they agree--> meeting --all have met--> idle

A rank that does not come back within the grace period, or whose numbers differ, is out of step with the others. So is
one, at once, that has entered an operation which another one, who is back, has not: that will never be complete. As
ranks may come to it late, all are asked again until the grace period is over. It cannot be repaired: the ranks are
stopped, as those of a failed launch are. So they are if one of them ends.

Where other machines have ranks, too, an agent ends its own ranks' part of a call, and who calls them all compares what
they tell, as numbers that agree here may differ from those of another machine:

    running --failure or deadline here, or EndCall for one elsewhere--> asking --> calling back
            --all here have answered--> telling --RanksBack--> waiting for the others --MeetAgain--> meeting --> idle
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence

from mlaunch.agent.launch_state import LaunchState, OngoingCall
from mlaunch.agent.one_call import Calls
from mlaunch.agent.questions import NumberRequests
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.scene import AgentParts
from mlaunch.agent.stopping import Escalation
from mlaunch.base.deadline import Deadline
from mlaunch.base.fds import close_all, memory_file
from mlaunch.base.frames import STACKS_TIMEOUT
from mlaunch.protocol import payload
from mlaunch.protocol.channel import FD_LIMIT
from mlaunch.protocol.messages import (
    AgentHears,
    AnswerKind,
    CallOver,
    EndCall,
    EndRanks,
    Errand,
    MeetAgain,
    NextCall,
    Phase,
    RankAnswered,
    RanksBack,
    RanksStand,
)
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import in_step

_LOOK_DELAY = 0.1  # seconds between looks whether ranks that were asked to stop have answered their launcher
# A rank in one of these looks at the board when its call begins; an interrupt before that would end it.
_BEFORE_CALLS = frozenset({Phase.STARTING, Phase.BINDING, Phase.JOINING})
_CHECK_TIMEOUT = 1.0  # seconds, at least, for ranks that have all come back to compare and meet


class RepeatedCalls(Calls):
    """One call after the other, until the launcher asks the ranks to leave."""

    must_stay = True

    def __init__(self, launch: LaunchState, parts: AgentParts) -> None:
        super().__init__(launch, parts)
        launch.call = OngoingCall(0, released=True)  # the numbers are the launcher's
        self._numbers = NumberRequests(launch.questions)
        self._were_back: list[int] = []  # ranks that had come back when all were asked: they will enter nothing more
        self._failed = False  # the call did not end by itself
        self._kept_back: list[tuple[RankAnswered, list[int]]] = []
        self._escalation = Escalation(
            launch.clock, launch.grace_period, a_rank_ends=launch.stopping.a_rank_ends,
            ask=self._ask, waits=self._waits, starved=launch.stopping.asked.starved,
            request=self._call_back, force=self._lose,
        )  # fmt: skip
        for rank in launch.by_local_rank:
            rank.answer = AnswerKind.VALUE  # they are at work for nobody

    # What the launcher says

    def hear(self, record: AgentHears | None, fds: list[int]) -> bool:
        if isinstance(record, NextCall):
            self._begin_next(record, fds)
        elif isinstance(record, EndCall):
            if record.number == self._launch.call.number:
                self._end_callers(record)
        elif isinstance(record, EndRanks):
            self.must_stay = False
            # One may have answered its launcher a moment ago and not be back yet: it leaves by itself, too.
            self._launch.stopping.without_asking(force=False, spare_leaving=True)
        else:
            return False
        return True

    def _begin_next(self, record: NextCall, fds: list[int]) -> None:
        if not self._lacks_ranks():  # else its caller will hear of it
            deadline = Deadline().start(record.deadline, self._launch.clock())
            self._failed = False
            self._parts.over()
            call = OngoingCall(record.number, record.deadline, deadline)
            self._launch.begin(call, record.data, fds[0] if fds else None)
        close_all(fds)

    def catch_up(self) -> None:
        launch, number = self._launch, self._launch.board.call
        if number > launch.call.number:
            self._parts.over()
            launch.call, self._failed = OngoingCall(number, from_launcher=True), False
            for rank in launch.by_local_rank:
                rank.expect(answered=False)
        if launch.call.from_launcher and not launch.call.released:
            for rank in launch.by_local_rank:
                if rank.answer is None and launch.board.answered(rank.local_rank) == number:
                    rank.expect(answered=True)

    def _end_callers(self, asked: EndCall) -> None:
        """End the call as its launcher asks. If it is over already, only say so."""
        call = self._launch.call
        if call.released:
            self._launch.launcher.try_send(CallOver(asked.number))
        elif asked.late is not None:  # as if we had kept it
            call.seconds = asked.late
            call.deadline.start(0.0, self._launch.clock())
        else:
            self.end(0.0)

    # How a call ends

    def forward(self, rank: RankProcess, record: RankAnswered) -> None:
        """Keep values until all are there, so that the launcher is woken once; but not beside a failure."""
        if rank.content.memfd >= 0:  # before the launcher can send the next call
            rank.give_answer_file()
        self._kept_back.append((record, rank.content.fds()))
        if record.kind is not AnswerKind.VALUE or self._failed or self._launch.call.from_launcher:
            self._send_answers()

    def _send_answers(self, *, but: int = 0) -> None:
        """Send what was kept, except the last ``but`` answers."""
        sent = self._kept_back[: len(self._kept_back) - but]
        for record, fds in sent:
            self._launch.launcher.try_send(record, fds)
        del self._kept_back[: len(sent)]

    def lose_rank(self) -> None:
        self._failed = True  # from now on answers are forwarded at once, while their descriptors are there
        self._send_answers()

    def all_answered(self) -> None:
        """Take the next step to the end of the call."""
        if self._lacks_ranks():
            return
        call, ranks = self._launch.call, self._launch.by_local_rank
        call.released = True
        self._escalation.clear()
        self._numbers.clear()
        if not self._failed:
            self._finish()
        elif call.errand is Errand.RUN:
            self._send_on(Errand.TELL_NUMBERS)
        elif any(rank.answer is not AnswerKind.VALUE for rank in ranks):
            self._lose()
        elif call.errand is Errand.TELL_NUMBERS:
            self._compare([rank.content.read() for rank in ranks])
        else:
            self._finish()

    def _lacks_ranks(self) -> bool:
        """True if the end has begun, or is about to since a rank is gone."""
        launch = self._launch
        return launch.stopping.begun or len(launch.ranks) < len(launch.by_local_rank)

    def _compare(self, told: Sequence[in_step.Numbers]) -> None:
        """Have the ranks meet if their numbers say that they are in step."""
        if in_step.agree(told):
            self._send_on(Errand.MEET)
        else:
            self._lose()

    def _finish(self) -> None:
        launch, call = self._launch, self._launch.call
        launch.stopping.end_call()
        call.deadline.cancel()  # it could only be taken for the next call's
        self._parts.over()
        launch.inspection.end_request()
        # As many as one record takes descriptors of go with CallOver, so that the launcher wakes once.
        self._send_answers(but=FD_LIMIT)
        answers = tuple(record for record, _ in self._kept_back)
        fds = [fd for _, fds in self._kept_back for fd in fds]
        self._kept_back.clear()
        if self._failed or not call.from_launcher:  # else it knows
            launch.launcher.try_send(CallOver(call.number, answers), fds)

    def _send_on(self, errand: Errand) -> None:
        self._escalation.force_in(max(self._launch.grace_period, _CHECK_TIMEOUT))
        self._launch.begin(OngoingCall(self._launch.call.number, errand=errand))

    def end(self, delay: float) -> None:
        if self._launch.call.errand is Errand.RUN and not self._launch.call.released:
            self._send_answers()
            first, self._failed = not self._failed, True
            if first or self._escalation.will_ask:
                self._escalation.within(delay)

    # The steps that end it

    def due(self) -> float:
        due = self._escalation.due()
        if self._launch.call.from_launcher and self._parts.look_for_answers:  # answers that bypass this agent
            due = min(due, self._launch.clock() + _LOOK_DELAY)
        return due

    def take_steps(self) -> None:
        if self._launch.stopping.begun:  # which has steps of its own
            self._escalation.clear()
        self._escalation.take_steps()

    def _waits(self) -> bool:
        return self._launch.stopping.waits() or self._numbers.pending

    def _ask(self) -> None:
        """Ask those who still work for their stacks, and all where they are."""
        self._were_back = [rank.rank for rank in self._launch.by_local_rank if not rank.working]
        self._numbers.ask(self._launch.call.number)
        self._launch.stopping.ask_stacks([rank for rank in self._launch.ranks.values() if rank.working])

    def _call_back(self) -> None:
        """Raise KeyboardInterrupt in ranks that still work, once; stop all if one works for nothing."""
        if self._is_out_of_step(self._were_back):
            self._lose(force=False)
            return
        launch = self._launch
        self._escalation.within(STACKS_TIMEOUT)  # some may come later to an operation that will never be complete
        launch.stopping.asked.clear()
        for rank in launch.ranks.values():
            if rank.working:
                launch.launcher.try_send(launch.stopping.stacks_of(rank))
                # The number before the signal: a rank that begins a call looks at the board, so a signal too early is
                # not lost.
                launch.board.stop(rank.local_rank, launch.call.number)
                if launch.board[rank.local_rank] in _BEFORE_CALLS:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGINT)

    def _is_out_of_step(self, back: Sequence[int]) -> bool:
        """True if a rank waits in an operation that those that are back will never enter."""
        return in_step.is_lost(self._numbers.told, back)

    def _lose(self, *, force: bool = True) -> None:
        """Stop the ranks, which are out of step. ``force``: they have had their grace period."""
        self._escalation.clear()
        self._launch.stopping.without_asking(force=force, spare_leaving=True)


class PartOfRepeatedCalls(RepeatedCalls):
    """Where other machines have ranks, too: whether all are in step is for their launcher to find out."""

    def hear(self, record: AgentHears | None, fds: list[int]) -> bool:
        if isinstance(record, MeetAgain):
            if record.number == self._launch.call.number and not self._lacks_ranks():
                self._send_on(Errand.MEET)
            return True
        return super().hear(record, fds)

    def _end_callers(self, asked: EndCall) -> None:
        """Ask ranks that are back already where they stand: some on another machine are not back, or have failed."""
        if not self._launch.call.released:
            super()._end_callers(asked)
        elif not self._failed and not self._lacks_ranks():
            self._failed = True
            self._send_on(Errand.TELL_NUMBERS)

    def _is_out_of_step(self, back: Sequence[int]) -> bool:
        """True if ranks here are out of step; send the launcher what it needs to judge for all machines."""
        self._tell(RanksStand(self._launch.call.number, tuple(back)), dict(self._numbers.told))
        return super()._is_out_of_step(back)

    def _compare(self, told: Sequence[in_step.Numbers]) -> None:
        ranks = (rank.rank for rank in self._launch.by_local_rank)
        self._tell(RanksBack(self._launch.call.number), dict(zip(ranks, told, strict=True)))

    def _tell(self, record: RanksBack | RanksStand, told: Mapping[int, in_step.Numbers]) -> None:
        memfd = memory_file("numbers")
        payload.write(memfd, told)
        self._launch.launcher.try_send(record, [memfd])
        close_all([memfd])


def calls_of(spec: LaunchSpec) -> type[Calls]:
    """Return how an agent of these ranks runs their calls."""
    return RepeatedCalls if spec.cluster is None else PartOfRepeatedCalls
