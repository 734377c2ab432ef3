"""A launch whose ranks stay: its calls are begun, heard and ended one after the other."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from mlaunch.caller.handle import LaunchHandle
from mlaunch.caller.kept.kept_call import KeptCall
from mlaunch.caller.limits import Limits
from mlaunch.caller.outcome import Outcome
from mlaunch.caller.output.plan import OutputPlan
from mlaunch.caller.settle import Ended, settle
from mlaunch.caller.status import status_lines
from mlaunch.protocol.channel import Channel, pickled
from mlaunch.protocol.kept_messages import CallOver, EndCall, EndRanks, NextCall
from mlaunch.protocol.messages import Answer, Cancel, RankAnswered, RanksStarting, RankStarted, RunCall
from mlaunch.protocol.results import ResultQueue
from mlaunch.protocol.spec import LaunchSpec

_CHECK_TIMEOUT = 1.0  # seconds that ranks have to compare and meet, at least


@dataclass
class KeptHandle(LaunchHandle):
    """Between two calls its outcome is that of the ranks themselves, of which nothing has been asked."""

    _is_settled: bool = False  # the last call, and no other output has begun
    over: bool = False  # the call that was begun last
    _number: int = 0  # its number
    _by_itself: bool = False  # it is over when all values are there; else when the agent says so
    _ways: dict[int, Channel] = field(default_factory=dict)  # to the ranks
    _answers: ResultQueue | None = None  # from them
    idle_spec: LaunchSpec = field(init=False)
    idle_plan: OutputPlan = field(init=False)  # for what ranks print while no call runs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.idle_spec = self.spec
        self.idle_plan = dataclasses.replace(self.relay.output.plan, area=None)
        self.relay.output.stand_aside()

    def begin(self, call: KeptCall) -> None:
        """Sends the call. OSError if the agent is gone."""
        self._turn(call.plan, call.spec)
        self.over, self._number = False, call.number
        self._by_itself = call.spec.deadline is None and len(self._ways) == self.spec.world_size
        data, fds = call.content.data, call.content.fds()
        if not self._by_itself or self.history.board is None:
            self.agent.send(NextCall(call.number, call.spec.deadline, data), fds)
            return
        self.history.board.call = call.number
        record = pickled(RunCall(call.number, data=data, attached=bool(fds), from_launcher=True))
        for way in self._ways.values():
            way.try_send_pickled(record, fds)

    def finish(self) -> Ended:
        """Settles the call that is over; the ranks wait for the next one."""
        self._finish_output()
        ended = settle(self.outcome, self.report())
        self.outcome.close()
        self._is_settled = True
        return ended

    def step(self) -> bool:
        """Takes in what has come, without waiting; False after the last word of the launch."""
        self._turn_to_none()  # not at once: mostly the next call comes before ranks say anything
        return super().step()

    def end_call(self, call: KeptCall) -> None:
        """Asks to end it as Ctrl-C does."""
        self._by_itself = False
        self._limits.begin_cancel(force=False)
        self.agent.try_send(EndCall(call.number))

    def end_ranks(self) -> None:
        """Asks the ranks to leave."""
        self._turn_to_none()  # now, since it would begin to count anew
        self.ending = self.outcome.leaving = True
        self._limits.begin_cancel(force=False)
        self.agent.try_send(EndRanks())

    def cancel(self, *, force: bool) -> None:
        """Ends the launch, whatever its ranks do."""
        self.ending = True
        self._limits.begin_cancel(force=force)
        self.agent.try_send(Cancel(force))

    def settle_launch(self) -> Ended:
        """Settles how the launch itself has ended."""
        self._read_answers()
        self.relay.finish(0.0)
        return settle(self.outcome, self.report())

    def _turn_to_none(self) -> None:
        """Begins what belongs to no call, if that has not begun."""
        if self._is_settled:
            self._turn(self.idle_plan, self.idle_spec)
            self.relay.output.stand_aside()

    def _turn(self, plan: OutputPlan, spec: LaunchSpec) -> None:
        """Begins what belongs to one call, or to none."""
        self._is_settled = False
        self.outcome.close()
        self.spec, self.history = spec, copy.copy(self.history)  # of which the report of the last call is made
        self.history.begun = self.history.ready = time.monotonic()
        agent, grace_period = self._limits.agent, spec.grace_period + max(spec.grace_period, _CHECK_TIMEOUT)
        self._limits = Limits(grace_period, spec.deadline, self.server.kill, agent)
        self.outcome = Outcome(spec, plan.directory)
        self.relay.turn_to(plan, spec.local_world_size, self.history.board)
        self.relay.output.status = lambda: status_lines(self.outcome, self.history, self.waiting, over=self.over)

    def _pauses(self) -> bool:
        return self.over and not self._is_settled  # what comes now is not of the call that is over

    def _show(self, record: object, fds: Sequence[int]) -> None:
        if isinstance(record, CallOver):
            self._read_answers()
            self.over = self.over or record.number == self._number
            memfds = iter(fds)
            for answer in record.answers:
                self.outcome.take(answer, [] if answer.data else [next(memfds)])
        elif isinstance(record, RanksStarting):
            self._answers = ResultQueue(Connection(fds[1], writable=False))
            self.relay.watch(fds[1])
        elif isinstance(record, RankStarted):
            self._ways[record.rank] = Channel.adopt(fds[0])
            fds = fds[1:]
        self._note_values()
        super()._show(record, fds)

    def _take_answers(self, ready: set[int]) -> None:
        if self._answers is not None and self._answers.fileno() in ready:
            self._read_answers()
            self._note_values()

    def _read_answers(self) -> None:
        """Takes in the values that ranks have sent without their agent."""
        if self._answers is None:
            return
        try:
            answers = self._answers.drain()
        except EOFError:  # the ranks are gone, and their agent
            self.relay.unwatch(self._answers.fileno())
            self._answers.close_reader()
            self._answers = None
            return
        for answer in answers:
            if answer.number == self._number:
                self._take_answer(answer)

    def _take_answer(self, answer: Answer) -> None:
        rank = self.spec.rank(answer.local_rank)
        told = (answer.kind, answer.consequence, time.monotonic(), answer.stale, answer.data)
        self.outcome.take(RankAnswered(rank, self.history.started[rank].pid, *told), [])

    def _note_values(self) -> None:
        """Notes whether all values of a call are there that is over with them."""
        if self._by_itself and len(self.outcome.values) == self.spec.world_size:
            self.over = True

    def close(self) -> None:
        super().close()
        for way in self._ways.values():
            way.close()
        if self._answers is not None:
            self._answers.close_reader()

    def _end_output(self, until: float) -> None:
        self.relay.finish_call(until)
