"""A launch whose ranks stay: its calls are begun, heard and ended one after the other."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlaunch.caller import interrupts
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.launch.watchdog import Limits
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.output.relay import Events
from mlaunch.caller.ranks.direct_handle import DirectHandle
from mlaunch.caller.ranks.driven import KeptServer
from mlaunch.caller.ranks.kept_call import KeptCall
from mlaunch.caller.ranks.settle_call import settle_call, settle_values
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.protocol.messages import (
    AgentSays,
    CallOver,
    Cancel,
    DirectAnswer,
    EndCall,
    EndRanks,
    NextCall,
    RanksStarting,
)
from mlaunch.protocol.spec import LaunchSpec

_AHEAD = 1.0  # seconds after which a call is no short one
_CHECK_TIMEOUT = 1.0  # seconds that ranks have to compare and meet, at least


@dataclass
class KeptHandle(DirectHandle):
    """Between two calls its outcome is that of the ranks themselves, of which nothing has been asked."""

    server: KeptServer
    idle_spec: LaunchSpec = field(init=False)
    idle_plan: OutputPlan = field(init=False)  # for what ranks print while no call runs
    # Fast path: only values were kept so far; no outcome or output of its own exists yet.
    ahead: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_settled = False  # the last call, and no other output has begun
        self._name = ""  # of the call that was begun last, as the board has it
        self._call: KeptCall | None = None  # it, while it is ahead
        self._begun = 0.0  # when it began, in monotonic seconds
        self._told: dict[int, DirectAnswer] = {}  # its values, by local rank, while it is ahead
        self.idle_spec = self.spec
        self.idle_plan = dataclasses.replace(self.relay.output.plan, area=None)
        self.relay.output.stand_aside()

    def begin(self, call: KeptCall) -> None:
        """Sends the call. OSError if the agent is gone."""
        board, content = self.history.board, call.content
        self.over, self._number, self._begun = False, call.number, time.monotonic()
        self._watchers.begin(self._begun)
        self._present_call, self._unsent = call.number, call.take_words()
        self._by_itself = len(self._direct) == self.spec.world_size
        # After a pause the processor's caches have forgotten us, and each line of Python costs three times what it
        # costs in a loop. So an outcome and an output of the call's own are made only if something else than values
        # comes.
        self.ahead = self._by_itself and self.relay.output.serves(call.plan)
        if self.ahead:
            self._call, self._told = call, {}
            if call.spec.call.deadline is not None or self._limits.deadline is not None:
                self._limit(call.spec)
        else:
            self._turn(call.plan, call.spec)
        if call.spec.call.name != self._name:  # to compare costs less than to write
            self._name = call.spec.call.name
            self._show_name()
        if self._by_itself and board is not None:
            self._direct.send(board, call.number, content)
        else:
            self.agent.send(NextCall(call.number, call.spec.call.deadline, content.data), content.fds())
        self._send_words()

    def finish(self) -> tuple[Callable[[], Ended], str]:
        """Ends the call that is over; the ranks wait for the next one. Also returns what is stale in them.

        Returns:
            What settles the call, to be called once, without a lock: it unpickles values, by user code.
        """
        self._watchers.rest()
        found = self._finish_ahead()
        if found is None:
            self._turn_to_present()
            self._finish_output()
            found = functools.partial(settle_call, self.outcome, self.report()), self.outcome.stale
            self.outcome = Outcome(self.spec)  # that one has its values still to read
            self.relay.output.stand_aside()  # else other calls would be numbered beside ranks that do nothing
        self._is_settled = True
        return found

    # Ahead: most calls are short, and nothing happens but that all values come

    def wait_ahead(self) -> list[int]:
        """Waits until something has come, for a while; returns the descriptors that can be read."""
        with interrupts.allowed():
            due = (_AHEAD, self._watchers.timeout(), self._limits.timeout())
            return [fd for fd, _ in self.relay.wait(min(seconds for seconds in due if seconds is not None))]

    def hear_ahead(self, ready: list[int]) -> bool:
        """Takes in values; False if something else has come, or somebody else has taken them in."""
        if not self.ahead or ready != [self._direct.fd] or not self._direct.intact():
            return False
        for answer in self._direct.drain():
            if answer[1] == self._number:
                self._told[answer[0]] = answer
        self.over = len(self._told) == self.spec.world_size
        return True

    def _finish_ahead(self) -> tuple[Callable[[], Ended], str] | None:
        """Does as ``finish`` for a call of which only values have come; None if there is more to it."""
        if not self.ahead or self._call is None or self.relay.wait(0.0):
            return None
        spec, values = self._call.spec, [self._told[rank][3] for rank in range(self.spec.world_size)]
        report = self.history.report_of_values(spec, list(map(len, values)), self._begun, self.relay.output.tails())
        self.ahead, self._call = False, None
        return functools.partial(settle_values, spec, values, report), self._told[0][2]

    def _turn_to_present(self) -> None:
        """Begins in full what was begun ahead."""
        if self.ahead and self._call is not None:
            self.ahead = False
            self._turn(self._call.plan, self._call.spec)
            for answer in self._told.values():
                self._take_answer(answer)
            self._note_values()
            self._call = None

    def step(self, readable: Events | None = None) -> bool:
        """Takes in what has come, without waiting; False after the last word of the launch."""
        self._turn_to_present()
        self._turn_to_none()  # not at once: mostly the next call comes before ranks say anything
        return super().step(readable)

    def end_call(self, interrupt: BaseException) -> None:
        """Asks to end it, as Ctrl-C does, because of an interrupt."""
        self._turn_to_present()
        self.outcome.interrupted_by(interrupt)
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Asks for the end of the call alone."""
        self._limits.begin_cancel(force=False)
        self._end_by(EndCall(self._number))

    def _end_by(self, asked: EndCall) -> None:
        self._by_itself = False  # from here on
        self.agent.try_send(asked)

    def _end_late(self) -> None:
        """Tells the agent that the deadline of the call has passed, unless all values are there."""
        if not self.over:
            self._end_by(EndCall(self._number, self._limits.deadline))

    def end_ranks(self) -> None:
        """Asks the ranks to leave."""
        self._turn_to_present()
        self._turn_to_none()  # now, since it would begin to count anew
        self.ending = self.outcome.leaving = True
        self._limits.begin_cancel(force=False)
        self.agent.try_send(EndRanks())

    def cancel(self, *, force: bool) -> None:
        """Ends the launch, whatever its ranks do."""
        self._turn_to_present()
        self.ending = True
        self._limits.begin_cancel(force=force)
        self.agent.try_send(Cancel(force))

    def finish_launch(self) -> tuple[Outcome, Callable[[], LaunchReport]]:
        """Returns what was heard of the launch, which is over; to be settled without a lock, and closed."""
        self._read_answers()
        self.relay.finish(0.0)
        found = self.outcome, self.report()
        self.outcome = Outcome(self.spec)
        return found

    def adapt_output(self, plan: OutputPlan) -> OutputPlan:
        """Returns the plan of a call's output, adapted to these ranks: with host names, if they are on several."""
        return plan

    def _turn_to_none(self) -> None:
        """Switches to the idle state between calls, unless already there."""
        if self._is_settled:
            self._begun = time.monotonic()
            self._turn(self.idle_plan, self.idle_spec)
            self.relay.output.stand_aside()

    def _turn(self, plan: OutputPlan, spec: LaunchSpec) -> None:
        """Begins what belongs to one call, or to none."""
        self._is_settled = False
        self.outcome.close()
        self.spec = spec
        self.history = dataclasses.replace(self.history, begun=self._begun, ready=self._begun)  # the last one's is read
        self._limit(spec)
        self.outcome = Outcome(spec, plan.directory, started=self.history.started)
        self.relay.turn_to(plan, spec.local_world_size, self.history.board)

    def _limit(self, spec: LaunchSpec) -> None:
        """Begins to count for a call, which has begun before; keeps the deadline where no agent does."""
        agent, grace_period = self._limits.agent, spec.grace_period + max(spec.grace_period, _CHECK_TIMEOUT)
        late = self._end_late if self._by_itself and spec.call.deadline is not None else None
        self._limits = Limits(grace_period, spec.call.deadline, self.server.kill, agent, late, self._begun)
        self._limits.hold(self._watchers.held)

    def _show(self, record: AgentSays, fds: Sequence[int]) -> None:
        if isinstance(record, CallOver):
            self._read_answers()
            self.over = self.over or record.number == self._number
            memfds = iter(fds)
            for answer in record.answers:
                self.outcome.take(answer, [] if answer.data else [next(memfds)])
        super()._show(record, fds)
        if isinstance(record, RanksStarting):
            self._show_name()

    def _show_name(self) -> None:
        """Writes for ``mlaunch ps`` what runs now, once there is a place for it."""
        if self.history.board is not None:
            self.history.board.name = self._name
