"""A launch as its caller drives it: take in its agent's records, pass on what its ranks print, end it. ::

agent's channel --records--> step() --> Outcome (values, failures), History (times), Watchers
ranks' pipes ------bytes---> step() --> Relay --> CallOutput --> console, files
nothing for too long ------> step() --> Limits: kill the agent, then the fork server
Finished, Reaped, or the end of the channel --> step() is False --> end(): settled, as values or an error

``Watchers`` has the features that watch a call which takes long.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.exceptions import RankFailure, report_of
from mlaunch.base.fds import KeptFd
from mlaunch.base.text import in_bytes
from mlaunch.caller import interrupts
from mlaunch.caller.fork_server import ServerGoneError
from mlaunch.caller.interrupts import EndSignal
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.settle import Ended, Steps, add_note, settle
from mlaunch.caller.launch.watchdog import Backing, Killed, Limits, remove_names
from mlaunch.caller.output.relay import Events, Relay
from mlaunch.caller.report.launch_report import History, LaunchReport
from mlaunch.core.records import Need, Noticed
from mlaunch.protocol import registry
from mlaunch.protocol.messages import (
    AgentSays,
    AgentStarted,
    CallBegun,
    Cancel,
    Finished,
    ForPart,
    LaunchersEnd,
    NamesLeft,
    PartSays,
    Question,
    RankStarted,
    Reaped,
    Told,
    Waiting,
)
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts
    from mlaunch.core.parts import Watcher

    TakeRanks = Callable[[Sequence[Mapping[str, Any]]], None]  # each as its agent describes it
    TakeNoticed = Callable[[Noticed, RankFailure | None], None]

_NAMES = 3  # files in /dev/shm that a sentence shows
# Seconds until watchers begin: if options ask for something, and otherwise. Shorter calls are spared the work.
_SOON, _LATE = 0.2, 10.0
_NEVER = float("inf")


class WatchedCall:
    """A call, as the features see it that watch calls which take longer than a moment, such as ``stall=``. ::

        begin --later--> watch(call) of each feature's caller.py --> its watcher --ask--> the launch's agent
                                                                         +------found--> the user, or the call's end

    Attributes:
        spec: Its launch.
        begun: When it began, in monotonic seconds.
        clock: Returns the time in monotonic seconds.
    """

    clock = staticmethod(time.monotonic)

    def __init__(
        self, spec: LaunchSpec, begun: float, ask: Callable[[bytes, TakeRanks], None], found: TakeNoticed
    ) -> None:
        self.spec, self.begun = spec, begun
        self._ask, self._found = ask, found

    def ask(self, word: bytes, take: TakeRanks) -> None:
        """Ask its agent as a visitor does (``protocol/registry.py``); ``take`` gets what the agent tells of ranks."""
        self._ask(word, take)

    def found(self, noticed: Noticed, failure: RankFailure | None = None) -> None:
        """Tell the user what was found. With ``failure``, end the call by that instead, unless it has failed."""
        self._found(noticed, failure)


class Watchers:
    """The watchers of one launch. ``send`` sends to its agent, ``found`` takes what they find."""

    def __init__(self, spec: LaunchSpec, send: Callable[[Question], object], found: TakeNoticed) -> None:
        self._spec, self._send, self._found = spec, send, found
        self._watchers: list[Watcher] = []
        self._begun = self._due = _NEVER  # when the call began; when watchers are made
        self._asked: dict[int, TakeRanks] = {}  # by the number of the question
        self._number = 0
        self.held = False  # a user is debugging

    def begin(self, now: float) -> None:
        """Begin to watch a call."""
        self._watchers, self._asked = [], {}
        self._begun, self._due = now, now + (_SOON if self._spec.sections else _LATE)

    def rest(self) -> None:
        """Stop: the call is over."""
        self._watchers, self._asked = [], {}
        self._begun = self._due = _NEVER

    def hold(self, *, held: bool) -> None:
        """Stop the watchers while a user is debugging, or start them again."""
        self.held = held
        if self._begun < _NEVER:
            self.begin(time.monotonic())

    def timeout(self) -> float | None:
        """Return the seconds until ``take_steps`` has something to do; None if it has nothing."""
        due = self._due
        for watcher in self._watchers:
            due = min(due, watcher.due)
        return None if self.held or due == _NEVER else max(0.0, due - time.monotonic())

    def take_steps(self) -> None:
        """Take the steps that are due."""
        if self.held or self._begun == _NEVER:
            return
        now = time.monotonic()
        if now >= self._due:
            from mlaunch.core.load import watchers_of  # short calls do not need it

            self._due = _NEVER
            self._watchers = watchers_of(WatchedCall(self._spec, self._begun, self._ask, self._found))
        for watcher in self._watchers:
            if now >= watcher.due:
                watcher.take_steps()

    def _ask(self, word: bytes, take: TakeRanks) -> None:
        self._number += 1
        self._asked[self._number] = take
        self._send(Question(self._number, word))

    def take(self, number: int, status: Mapping[str, Any]) -> None:
        """Pass on the answer to a question, unless it is about an earlier call."""
        if (take := self._asked.pop(number, None)) is not None:
            take(status["ranks"])


@dataclass
class LaunchHandle:
    """A launch that has been sent to its fork server.

    It can be driven from any loop: wait until ``fileno()`` can be read, or ``timeout()`` is over, then call ``step()``,
    until that is False. ``drive()`` has these steps.
    """

    spec: LaunchSpec
    server: Backing
    agent: LaunchersEnd
    relay: Relay
    history: History
    prepared: bool = False  # it started before the call
    outcome: Outcome = field(init=False)
    waiting: str = field(default="", init=False)  # the other machines that it waits for
    ending: bool = field(default=False, init=False)  # it is being cancelled
    over: bool = field(default=False, init=False)  # the call that was begun last is over, though its ranks stay
    seen_as: str = field(default="", init=False)  # its ID for processes that look at it; "": that of the launch
    said_last: Callable[[], str] = field(default=str, init=False)  # what ranks have reported, for the status line
    parts: CallerParts | None = field(default=None, init=False)  # of features, which take what comes
    never_began: bool = field(default=False, init=False)  # server or agent died before: nothing has run, try again

    def __post_init__(self) -> None:
        self._has_begun = False
        self._unsent: list[tuple[str, object]] = []  # for parts in the agent, until there are ranks
        self._present_call = 0  # number
        self._limits = Limits(self.spec.grace_period, self.spec.seconds, self.server.kill)
        self.outcome = Outcome(self.spec, self.relay.output.plan.directory)
        self.relay.show_status(self._status)
        self.relay.watch(self.agent.fileno())
        self._watchers = Watchers(self.spec, self.agent.try_send, self._take_noticed)
        if not self.spec.stays:
            self._watchers.begin(time.monotonic())

    def attach(self, parts: CallerParts) -> None:
        """Connect the parts of features: they take what comes, and can send to their parts in the agent."""
        self.parts = parts
        parts.attach(self.tell_part)

    def _take_noticed(self, noticed: Noticed, failure: RankFailure | None) -> None:
        if failure is None:
            self.relay.output.say(f"{self.spec.call.name} {noticed.what}")
        elif self.outcome.failed:
            return
        if self.parts is not None:
            self.parts.noticed(noticed)
        if failure is not None:
            self.end_for(failure)

    def _status(self) -> list[str]:
        """Return the progress of the launch, for the status lines."""
        from mlaunch.core.load import module_of  # most launches do not need it

        first, *others = module_of("display", "caller").status_lines(
            self.outcome, self.history, self.waiting, over=self.over
        )
        said = self.said_last()
        return [f"{first}, {said}" if said else first, *others]

    def fileno(self) -> int:
        """Return a descriptor that can be read when ``step`` has something to do."""
        return self.relay.fileno()

    def tell_part(self, feature: str, word: object) -> None:
        """Send a feature's part in the agent a word about the present call, as soon as there are ranks."""
        self._unsent.append((feature, word))
        self._send_words()

    def _send_words(self) -> None:
        # If a signal handler adds a word meanwhile, it is sent by the handler, or here.
        while self._unsent and self.history.board is not None:
            feature, word = self._unsent.pop(0)
            self.agent.try_send(ForPart(feature, self._present_call, word))

    def intact(self) -> bool:
        """True if the descriptors are still its own: other code may have closed them and opened files."""
        return self.relay.intact() and self.agent.intact()

    def timeout(self) -> float | None:
        """Return the seconds until ``step`` is due even if nothing can be read; None if it is not due."""
        due = (self.relay.timeout(), self._limits.timeout(), self._watchers.timeout())
        return min((seconds for seconds in due if seconds is not None), default=None)

    def step(self, readable: Events | None = None) -> bool:
        """Take in what has come, without waiting; return False after the launch's last word.

        ``readable``: what can be read, if the relay has already been asked; otherwise it is asked here.
        """
        ready = self.relay.carry(readable)
        self._watchers.take_steps()
        if self._limits.agent is not None and self._limits.agent.fd in ready:
            self.relay.unwatch(self._limits.agent.fd)
            self._limits.agent_ended()
        self._take_answers(ready)
        if self.agent.fileno() not in ready:
            return self._press()
        while self._hear():
            # Of ranks that stay: what comes after a call is over belongs to no call, or to the next one.
            if self.over or not linux.wait_readable([self.agent.fileno()], 0.0):
                return True
        return False

    def _take_answers(self, ready: set[int]) -> None:
        """Take in what ranks have sent without their agent."""

    def drive(self) -> Steps:
        """Wait for the launch's last process. An interrupt ends the launch, and then it is how the launch ended.

        Raises:
            ServerGoneError: The fork server, or the agent, was gone before the call began; nothing has run.
        """
        try:
            while self.step():
                yield Need(fds=(self.relay.fileno(),), timeout=self.timeout())
        except GeneratorExit:  # no loop drives it any more
            raise
        except BaseException as interrupt:  # Ctrl-C, or what another signal handler raised: end the launch first
            self._cancel(interrupt.number if isinstance(interrupt, EndSignal) else 0)
            if self.outcome.stacks:
                add_note(interrupt, f"{self.spec.call.name} was interrupted; {'; '.join(self.outcome.doing())}")
            self.outcome.interrupted_by(interrupt)
        return self.end()

    def end(self) -> Ended:
        """Return how the launch ended, after its last word, and show what ranks printed last. Raises as ``drive``."""
        self._finish_output()
        if self.never_began and self.outcome.interrupt is None:
            raise ServerGoneError(
                f"{self.outcome.broken or 'its agent left'} before it could start {self.spec.call.name}"
            )
        with interrupts.allowed():  # values are unpickled by user code
            ended = settle(self.outcome, self.report())
        report = report_of(ended.error) if ended.error is not None else None
        if report is not None:
            report.reached = self.history.reached(self.spec.local_world_size)
        if self.parts is not None:
            self.parts.noticed(ended)
        return ended

    @property
    def answered(self) -> bool:
        """True if all ranks have returned, so that it is too late to end the launch."""
        return len(self.outcome.values) + len(self.outcome.silent) >= self.spec.local_world_size

    def end_for(self, failure: RankFailure) -> None:
        """Ask for the launch's end because of this failure, which is no rank's."""
        self.outcome.failures.append(failure)
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Ask for the launch's end without waiting for it; ``step`` receives it."""
        self.ending = True
        self._limits.begin_cancel(force=False)
        self.agent.try_send(Cancel())

    def report(self) -> Callable[[], LaunchReport]:
        """Note what has happened so far; return a function that makes its report."""
        return self.history.report(self.outcome, self.relay.output.tails())

    def close(self) -> None:
        self.outcome.close()
        self.agent.close()
        self._limits.close()
        self.relay.close()
        if self.history.board is not None:
            self.history.board.close()

    def _finish_output(self) -> None:
        """Show what ranks printed last. A slow reader of it delays neither an error nor the deadline."""
        until = math.inf if self.spec.call.deadline is None else self.history.begun + self.spec.call.deadline
        try:
            self.relay.finish(0.0 if self.outcome.failed else until, stays=self.spec.stays)
        except BaseException as interrupt:
            self.outcome.interrupted_by(interrupt)

    def _cancel(self, by: int) -> None:
        """End the launch, for signal ``by`` if one came; if interrupted again, without the rest of the grace period."""
        force = over = False
        self.ending = True
        while not over:
            try:
                self._limits.begin_cancel(force=force)
                self.agent.try_send(Cancel(force, by or signal.SIGTERM, by))
                self._hear_out()
                over = True
            except BaseException:
                force = True

    def _hear_out(self) -> None:
        """Take in the launch's records to the last, even if this process has too few descriptors for its answers."""
        over = False
        while not over:
            with contextlib.suppress(OSError):
                over = not self.step()
                if not over:
                    interrupts.wait_readable([self.fileno()], self.timeout())

    def _hear(self) -> bool:
        """Take in one record; return False after the last."""
        record, fds = self.agent.hear()
        if record is None:
            self.never_began = not self._has_begun and not self.outcome.broken and not self.ending
            self.outcome.broken_by(self.outcome.broken or self.server.describe_end())
            remove_names(self.spec, self.outcome.spec)
            return False
        if isinstance(record, AgentStarted):
            # By its pidfd, which stays this process's even if the number is used again.
            self._limits.agent = KeptFd(fds[0])
            self.relay.watch(fds[0])
        # A prepared launch sends all but one record before it has its call; until then it may be attempted again.
        begins = isinstance(record, CallBegun) if self.prepared else not isinstance(record, AgentStarted | Reaped)
        self._has_begun = self._has_begun or begins
        self.history.take(record, fds)
        self.outcome.take(record, fds)
        if self.parts is not None:
            self.parts.noticed(record)
        if self._unsent:
            self._send_words()
        if isinstance(record, Reaped) and record.exitcode != 0:
            remove_names(self.spec, self.outcome.spec)
        if isinstance(record, (Finished, Reaped)):
            self.never_began = not self._has_begun and not self.ending
            return False
        self._show(record, fds)
        return True

    def _press(self) -> bool:
        """Kill a process that does not answer, such as a stopped agent; return False if none is left to wait for."""
        killed = self._limits.kill_if_overdue()
        if killed is not Killed.NONE and not self.outcome.broken:
            late = self.outcome.interrupt is None and self.spec.call.deadline is not None
            self.outcome.broken_by(self.server.silence, late=late)
        return killed is not Killed.NOTHING_LEFT

    def _show(self, record: AgentSays, fds: Sequence[int]) -> None:
        if isinstance(record, RankStarted):
            pipes, first = fds[record.channels :], self.outcome.spec.rank_start
            self.relay.adopt(record.rank, record.rank - first, pipes, self.history.board)
        elif isinstance(record, Told):
            self._watchers.take(record.number, registry.read_status(fds[0]))
        elif isinstance(record, Waiting):
            self.waiting = record.text
            self.relay.output.say(f"{self.spec.call.name} waits for its other machines, {record.text}")
        elif isinstance(record, PartSays):
            self._note(record)
        elif isinstance(record, NamesLeft):
            shown = ", ".join(record.paths[:_NAMES]) + (", ..." if record.paths[_NAMES:] else "")
            self.relay.output.say(
                f"nobody is left to remove {shown} on host {record.host}: {in_bytes(record.size)} of memory, which "
                f"{self.spec.call.name} has left there and no process uses any more"
            )

    def _note(self, record: PartSays) -> None:
        """Note what a feature's part in the agent has sent."""
        from mlaunch.core.load import module_of  # most launches do not need it

        note = module_of(record.feature, "caller").noted(record.news, self.spec.call.name)
        self.outcome.facts.update(note.facts)
        if note.holds is not None:
            self._limits.hold(note.holds)
            self._watchers.hold(held=note.holds)
        if note.words:
            self.relay.output.say(note.words)
        if note.event is not None and self.parts is not None:
            self.parts.noticed(note.event)
