"""A launch as its caller drives it: hear what its agent says, carry what its ranks print, end it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlaunch.base import linux
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.outcome import Outcome
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.history import History
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.settle import Ended, add_note, settle
from mlaunch.caller.status import status_lines
from mlaunch.protocol import registry
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Cancel, RankStarted, Reaped, Waiting
from mlaunch.protocol.spec import LaunchSpec


class StopSignal(BaseException):
    """A signal to this process, which its ranks are to get as well."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class LaunchHandle:
    """A launch that has been sent to its fork server.

    It can be driven from any loop: wait until ``fileno()`` can be read, or ``timeout()`` is over, then ``step()``,
    until that is False. ``wait()`` is such a loop.
    """

    spec: LaunchSpec
    server: ForkServer
    agent: Channel
    relay: Relay
    history: History
    outcome: Outcome = field(init=False)
    waiting: str = ""  # for other machines

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.spec, self.relay.output.plan.directory)
        self.relay.output.status = lambda: status_lines(self.outcome, self.history, self.waiting)
        self.relay.watch(self.agent.fileno())

    def fileno(self) -> int:
        """Returns a descriptor that can be read when ``step`` has something to do."""
        return self.relay.fileno()

    def timeout(self) -> float | None:
        """Returns the seconds until ``step`` is due though nothing can be read; None: it is not."""
        return self.relay.timeout()

    def step(self) -> bool:
        """Takes in what has come, without waiting; False after the launch's last word."""
        return self.agent.fileno() not in self.relay.carry() or self._hear()

    def wait(self) -> Ended:
        """Waits for the launch's last process. An interrupt ends the launch, and is how it ended."""
        try:
            while self.step():
                linux.wait_readable([self.fileno()], self.timeout())
        except BaseException as interrupt:  # Ctrl-C, or what another signal handler raised: end the launch first
            self._cancel(interrupt.number if isinstance(interrupt, StopSignal) else signal.SIGTERM)
            if self.outcome.stacks:
                doing = "; ".join(self.outcome.doing())
                add_note(interrupt, f"{self.spec.name} was ended by this; {doing}")
            self.outcome.interrupt = interrupt
        self.relay.finish()
        return settle(self.outcome, self.report())

    def report(self) -> LaunchReport:
        """Reports what has happened so far."""
        return self.history.report(self.outcome)

    def close(self) -> None:
        self.outcome.close()
        self.agent.close()
        self.relay.close()
        self.history.close()

    def _cancel(self, number: int) -> None:
        """Ends the launch; interrupted again, whether by Ctrl-C or a handler that raises, without more grace."""
        force = over = False
        while not over:
            try:
                self.agent.try_send(Cancel(force, number))
                self._hear_out()
                over = True
            except BaseException:
                force = True

    def _hear_out(self) -> None:
        """Hears the launch to its last word, even if this process is too short of files to take in its answers."""
        over = False
        while not over:
            with contextlib.suppress(OSError):
                over = not self.step()
                if not over:
                    linux.wait_readable([self.fileno()], self.timeout())

    def _hear(self) -> bool:
        """Takes in one record; False after the last."""
        try:
            record, fds = self.agent.receive()
        except EOFError:
            self.outcome.broken = self.server.describe_end()
            return False
        self.history.take(record, fds)
        self.outcome.take(record, fds)
        if isinstance(record, Reaped):
            if record.exitcode != 0:
                registry.remove(self.spec.context.environ, self.spec.launch_id)
            return False
        self._show(record, fds)
        return True

    def _show(self, record: object, fds: Sequence[int]) -> None:
        if isinstance(record, RankStarted):
            self.relay.adopt(record.rank, record.rank - self.spec.rank_start, fds)
        elif isinstance(record, Waiting):
            self.waiting = record.text
            self.relay.output.say(f"{self.spec.name} waits for its other machines, {record.text}")
