"""A launch whose ranks stay: its calls are begun, taken in and ended one after the other.

Calls and small values go past the agent, which sleeps meanwhile: to each rank by a channel of its own, and back by one
queue of all ranks, in which the last rank to answer wakes the launcher.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

from mlaunch.base import linux
from mlaunch.base.fds import KeptFd
from mlaunch.caller import interrupts
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.settle import Ended, add_note, settle
from mlaunch.caller.launch.watchdog import Backing, Limits
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.output.relay import Events
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import (
    AgentSays,
    AnswerKind,
    CallOver,
    Cancel,
    DirectAnswer,
    EndCall,
    EndRanks,
    NextCall,
    RankAnswered,
    RankHears,
    RankSays,
    RanksStarting,
    RankStarted,
)
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.result_queue import ResultQueue
from mlaunch.protocol.server_messages import BoardFds, DirectFds
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.ranks.caller.kept_call import KeptCall

_AHEAD = 1.0  # seconds after which a call is not short any more
_CHECK_TIMEOUT = 1.0  # seconds that ranks have to compare and meet, at least


class KeptServer(Backing, Protocol):
    """The server behind ranks that stay: a fork server, or an engine's machines."""

    def ended(self) -> bool:
        """True if it has ended."""

    def close(self) -> None:
        """End the server after the ranks have ended, if it serves only these."""


@dataclass
class KeptHandle(LaunchHandle):
    """A launch whose calls follow each other. Between two, its outcome is that of ranks without a call."""

    server: KeptServer
    idle_spec: LaunchSpec = field(init=False)
    idle_plan: OutputPlan = field(init=False)  # for what ranks print while no call runs
    # Fast path: only values have come so far; no outcome or output of the call's own exists yet.
    ahead: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = 0  # of the call that began last
        self._by_itself = False  # it is over when all values are there; otherwise when the agent says so
        self._direct = DirectWays()
        self._is_settled = False  # the last call, and no other output has begun
        self._name = ""  # of the call that began last, as the board has it
        self._call: KeptCall | None = None  # the present call, while it is ahead
        self._begun = 0.0  # when it began, in monotonic seconds
        self._told: dict[int, DirectAnswer] = {}  # the values of that call, by local rank
        self.idle_spec = self.spec
        self.idle_plan = dataclasses.replace(self.relay.output.plan, area=None)
        self.relay.output.stand_aside()

    def begin(self, call: KeptCall) -> None:
        """Send the call. OSError if the agent is gone."""
        board, content = self.history.board, call.content
        self.over, self._number, self._begun = False, call.number, time.monotonic()
        self._watchers.begin(self._begun)
        self._present_call, self._unsent = call.number, call.take_words() if call.words else []
        self._by_itself = len(self._direct.ranks) == self.spec.world_size
        # After a pause, the processor's caches have lost this code, and each line of Python costs three times what it
        # costs in a loop. So an outcome and an output of the call's own are made only if something other than values
        # comes.
        self.ahead = self._by_itself and self.relay.output.serves(call.plan)
        if self.ahead:
            self._call, self._told = call, {}
            if call.spec.call.deadline is not None or self._limits.deadline is not None:
                self._limit(call.spec)
        else:
            self._turn(call.plan, call.spec)
        if call.spec.call.name != self._name:  # comparing costs less than writing
            self._name = call.spec.call.name
            self._show_name()
        if self._by_itself and board is not None:
            self._direct.send(board, call.number, content)
        else:
            self.agent.send(NextCall(call.number, call.spec.call.deadline, content.data), content.fds())
        if self._unsent:
            self._send_words()

    def finish(self) -> tuple[Callable[[], Ended], str]:
        """End the call that is over; the ranks wait for the next one. Also return which of their modules are stale.

        Returns:
            A function that settles the call, to be called once, without a lock: it unpickles values, by user code.
        """
        self._watchers.rest()
        found = self._finish_ahead()
        if found is None:
            self._turn_to_present()
            self._finish_output()
            found = functools.partial(_settle_call, self.outcome, self.report()), self.outcome.stale
            self.outcome = Outcome(self.spec)  # the function has yet to read that one's values
            self.relay.output.stand_aside()  # otherwise other calls would be numbered beside ranks that do nothing
        self._is_settled = True
        return found

    # Ahead: most calls are short, and nothing comes but all values

    def wait_ahead(self) -> Events:
        """Wait until something has come, for a while; return it."""
        with interrupts.allowed():
            timeout = _AHEAD
            for due in (self._watchers.timeout(), self._limits.timeout()):
                if due is not None and due < timeout:
                    timeout = due
            return self.relay.wait(timeout)

    def hear_ahead(self, come: Events) -> bool:
        """Take in values; return False if something else has come, or another thread has taken them in."""
        direct = self._direct
        if not self.ahead or come != [(direct.fd, select.EPOLLIN)]:
            return False
        if not self.relay.surely_watches(direct.fd) or not direct.answers_intact():
            return False
        for answer in direct.drain():
            if answer[1] == self._number:
                self._told[answer[0]] = answer
        self.over = len(self._told) == self.spec.world_size
        return True

    def _finish_ahead(self) -> tuple[Callable[[], Ended], str] | None:
        """Finish as ``finish`` does, if ranks have sent only values; otherwise return None."""
        if not self.ahead or self._call is None or self.relay.wait(0.0):
            return None
        spec, values = self._call.spec, [self._told[rank][3] for rank in range(self.spec.world_size)]
        sizes = list(map(len, values))
        report = self.history.report_of_values(spec, sizes, self._begun, self.relay.output.tails())
        self.ahead, self._call = False, None
        return functools.partial(_settle_values, spec, values, report), self._told[0][2]

    def _turn_to_present(self) -> None:
        """Begin in full the call that was begun ahead."""
        if self.ahead and self._call is not None:
            self.ahead = False
            self._turn(self._call.plan, self._call.spec)
            for answer in self._told.values():
                self._take_answer(answer)
            self._note_values()
            self._call = None

    def step(self, readable: Events | None = None) -> bool:
        """Take in what has come, without waiting; return False after the last word of the launch."""
        self._turn_to_present()
        self._turn_to_none()  # not at once: usually the next call comes before ranks print anything
        return super().step(readable)

    def end_call(self, interrupt: BaseException) -> None:
        """Ask to end the call, as Ctrl-C does, because of an interrupt."""
        self._turn_to_present()
        self.outcome.interrupted_by(interrupt)
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Ask for the end of the call only."""
        self._limits.begin_cancel(force=False)
        self._end_by(EndCall(self._number))

    def _end_by(self, asked: EndCall) -> None:
        self._by_itself = False  # from here on
        self.agent.try_send(asked)

    def _end_late(self) -> None:
        """Tell the agent that the call's deadline has passed, unless all values are there."""
        if not self.over:
            self._end_by(EndCall(self._number, self._limits.deadline))

    def end_ranks(self) -> None:
        """Ask the ranks to leave."""
        self._turn_to_present()
        self._turn_to_none()  # now, since it would count from the start again
        self.ending = self.outcome.leaving = True
        self._limits.begin_cancel(force=False)
        self.agent.try_send(EndRanks())

    def cancel(self, *, force: bool) -> None:
        """End the launch, even if its ranks are busy."""
        self._turn_to_present()
        self.ending = True
        self._limits.begin_cancel(force=force)
        self.agent.try_send(Cancel(force))

    def finish_launch(self) -> tuple[Outcome, Callable[[], LaunchReport]]:
        """Return the outcome of the launch, which is over, and its report; to be settled without a lock, and closed."""
        self._read_answers()
        self.relay.finish(0.0)
        found = self.outcome, self.report()
        self.outcome = Outcome(self.spec)
        return found

    def adapt_output(self, plan: OutputPlan) -> OutputPlan:
        """Return the plan of a call's output, adapted to these ranks: with host names, if they are on several."""
        return plan

    def _turn_to_none(self) -> None:
        """Switch to the idle state between calls, unless already there."""
        if self._is_settled:
            self._begun = time.monotonic()
            self._turn(self.idle_plan, self.idle_spec)
            self.relay.output.stand_aside()

    def _turn(self, plan: OutputPlan, spec: LaunchSpec) -> None:
        """Begin the outcome and output of one call, or of no call."""
        self._is_settled = False
        self.outcome.close()
        self.spec = spec
        self.history = dataclasses.replace(self.history, begun=self._begun, ready=self._begun)  # the old one was read
        self._limit(spec)
        self.outcome = Outcome(spec, plan.directory, started=self.history.started)
        self.relay.turn_to(plan, spec.local_world_size, self.history.board)

    def _limit(self, spec: LaunchSpec) -> None:
        """Begin to count for a call, which has begun before; keep its deadline here if no agent does."""
        agent, grace_period = self._limits.agent, spec.grace_period + max(spec.grace_period, _CHECK_TIMEOUT)
        late = self._end_late if self._by_itself and spec.call.deadline is not None else None
        self._limits = Limits(grace_period, spec.call.deadline, self.server.kill, agent, late, self._begun)
        self._limits.hold(self._watchers.held)

    def intact(self) -> bool:
        # Checked for each call: descriptors in the poll need no check of their own.
        if self.relay.surely_watches(self.agent.fileno(), self._direct.fd):
            return self._direct.others_intact()
        return super().intact() and self._direct.intact()

    def close(self) -> None:
        super().close()
        self._direct.close()

    def _show(self, record: AgentSays, fds: Sequence[int]) -> None:
        if isinstance(record, CallOver):
            self._read_answers()
            memfds = iter(fds)
            for answer in record.answers:
                self.outcome.take(answer, [] if answer.data else [next(memfds)])
            if record.number == self._number:
                # A rank notes a value before it sends it, so its agent may know of one that has not come yet.
                self._by_itself = self._awaits_values()
                self.over = self.over or not self._by_itself
        elif isinstance(record, RanksStarting) and (offered := BoardFds.of(fds).direct) is not None:
            self._direct.take_answers(offered, self.relay.watch(offered.all_there))
        elif isinstance(record, RankStarted) and record.channels:
            self._direct.take_rank(record.rank, fds[0])
        self._note_values()
        super()._show(record, fds)
        if isinstance(record, RanksStarting):
            self._show_name()

    def _show_name(self) -> None:
        """Write for ``mlaunch ps`` what runs now, once there is a place for it."""
        if self.history.board is not None:
            self.history.board.name = self._name

    # Values that come past the agent, of a call that is not ahead any more

    def _take_answers(self, ready: set[int]) -> None:
        if self._direct.fd in ready:
            self._read_answers()
            self._note_values()

    def _read_answers(self) -> None:
        """Take in the values that ranks have sent past their agent."""
        try:
            answers = self._direct.drain() if self._direct.can_answer() else ()
        except EOFError:  # the ranks are gone, and their agent
            self.relay.unwatch(self._direct.fd)
            self._direct.close_answers()
            return
        for answer in answers:
            if answer[1] == self._number:
                self._take_answer(answer)

    def _take_answer(self, answer: DirectAnswer) -> None:
        local_rank, _, stale, data = answer
        rank = self.spec.rank(local_rank)
        pid = self.history.started[rank].pid
        self.outcome.take(RankAnswered(rank, pid, AnswerKind.VALUE, False, time.monotonic(), stale, data), [])

    def _awaits_values(self) -> bool:
        """True if ranks that answer past the agent owe values, and nothing has gone wrong."""
        is_direct = len(self._direct.ranks) == self.spec.world_size
        return is_direct and not self.answered and not self.outcome.failed

    def _note_values(self) -> None:
        """Note whether all values are there, if the call is over with them."""
        if self._by_itself and len(self.outcome.values) == self.spec.world_size:
            self.over = True


def _is_nothing() -> bool:
    return True


class DirectWays:
    """The ways to ranks past their agent: for calls, and for small values back. Filled while the ranks start."""

    def __init__(self) -> None:
        self.ranks: dict[int, Channel[RankSays, RankHears]] = {}  # the ends on which the ranks receive
        self.fd = -1  # can be read when all have answered; -1: this way does not exist
        self._answers: ResultQueue[DirectAnswer] | None = None
        self._kept: tuple[KeptFd, ...] = ()  # the descriptors for answers, and ``fd``
        self._is_watched = _is_nothing
        self._others: dict[int, tuple[int, int] | None] = {}  # the files that all but ``fd`` refer to, by number

    def take_answers(self, offered: DirectFds, is_watched: Callable[[], bool]) -> None:
        """Take the descriptors for answers.

        ``is_watched``: True if the one that signals all answers is still the same.
        """
        self._is_watched = is_watched
        self.fd, self._answers = offered.all_there, ResultQueue(Connection(offered.answers, writable=False))
        self._kept = KeptFd(offered.answers), KeptFd(offered.all_there)
        self._others = {**self._others, **linux.identities([offered.answers])}

    def take_rank(self, rank: int, fd: int) -> None:
        """Take the end on which a rank receives."""
        self.ranks[rank] = Channel.adopt(fd)
        self._others = {**self._others, **linux.identities([fd])}

    def intact(self) -> bool:
        """True if the descriptors are still these ways': other code may have closed them and opened files."""
        return self.can_answer() and all(way.intact() for way in self.ranks.values())

    def others_intact(self) -> bool:
        """True if all descriptors but ``fd`` are intact; ``fd`` is not checked."""
        others = self._others
        return linux.identities(others) == others

    def answers_intact(self) -> bool:
        """True if the descriptors for answers are intact."""
        return bool(self._kept) and self._kept[0].intact()

    def can_answer(self) -> bool:
        """True if the descriptors for answers and ``fd`` are intact."""
        if not self._is_watched():
            self._kept[1].forget()
        return all(one.intact() for one in self._kept)

    def send(self, board: Board, number: int, content: Payload) -> None:
        """Send all ranks a call. If one is gone, its agent reports that."""
        # Before the call is sent: the agent, which wakes if a rank dies of it, must know which call it was.
        board.call = number
        # A plain tuple: pickle would look up the class of a record in each rank. Pickled once for all ranks.
        record, fds = pickle.dumps((number, content.data)), () if content.data else content.fds()
        for way in self.ranks.values():
            way.try_send_pickled(record, fds)

    def drain(self) -> Sequence[DirectAnswer]:
        """Return the answers that have come. EOFError if the ranks are gone, and their agent."""
        if self._answers is None:
            return ()
        try:  # noqa: SIM105 - slower, which a short call would feel
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        return self._answers.drain()

    def close_answers(self) -> None:
        """Close the end on which answers come."""
        if self._answers is not None:
            self._answers.leave_reader()
        for one in self._kept:
            one.close()
        self.fd, self._answers, self._kept, self._is_watched = -1, None, (), _is_nothing

    def close(self) -> None:
        """Close all descriptors."""
        self.close_answers()
        for way in self.ranks.values():
            way.close()


# The end of a call. Values are unpickled here, which may run user code.


def _settle_call(outcome: Outcome, report: Callable[[], LaunchReport]) -> Ended:
    """Settle a call by its outcome."""
    if outcome.interrupt is not None and outcome.stacks:
        add_note(outcome.interrupt, f"{outcome.spec.call.name} was interrupted; {'; '.join(outcome.doing())}")
    try:
        return settle(outcome, report)
    finally:
        outcome.close()


def _settle_values(spec: LaunchSpec, values: Sequence[bytes], report: Callable[[], LaunchReport]) -> Ended:
    """Settle a call that has only values, in the order of ranks."""
    try:
        return Ended(report, list(map(pickle.loads, values)), None)
    except (Exception, SystemExit):  # whatever a __setstate__ may raise: it raises again in the code that reports it
        return settle(Outcome(spec, values={rank: Payload(value) for rank, value in enumerate(values)}), report)
