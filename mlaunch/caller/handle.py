"""Hears what a launch says, and carries what its ranks print, until its last process is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.errors import RankFailure, describe_exit
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.outcome import Outcome, note
from mlaunch.caller.output.bars import in_minutes, loops
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.history import History
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.protocol import failures, payload, registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import (
    AgentFailed,
    Cancel,
    DeadlinePassed,
    Kind,
    Phase,
    RankAnswered,
    RankGone,
    RanksStarting,
    RankStacks,
    RankStarted,
    Reaped,
    Refused,
    RemoteError,
    ServerGone,
    Value,
    Waiting,
)
from mlaunch.protocol.spec import LaunchSpec

RUNNING = {Phase.RUNNING, Phase.COMMANDED, Phase.ANSWERING, Phase.RETURNED, Phase.LEAVING}
_RUNTIME = os.path.dirname(__file__) + os.sep


class StopSignal(BaseException):
    """A signal to this process, which its ranks are to get as well."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Launch:
    """A launch as its caller hears it."""

    spec: LaunchSpec
    server: ForkServer
    agent: Channel
    relay: Relay
    history: History
    outcome: Outcome = field(init=False)
    waiting: str = ""  # for other machines

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.spec, self.relay.directory)
        self.relay.status = self._status

    def collect(self) -> list[Any]:
        """Waits for the launch's last process; then its results, or the exception of its first failure."""
        self._wait()
        return self.outcome.settle()

    def report(self) -> LaunchReport:
        """Of what has happened so far."""
        return self.history.report(self.outcome)

    def close(self) -> None:
        for memfd in self.outcome.values.values():
            os.close(memfd)
        self.agent.close()
        self.relay.close()
        if self.history.board is not None:
            self.history.board.close()

    def _status(self) -> list[str]:
        """The lines that show how far the launch is."""
        history = self.history
        size, gone = self.spec.local_size, len(history.gone)
        if gone == size:
            phase = "failed" if self.outcome.failures else "stopped" if self.outcome.stopped else "done"
        elif history.board is None:
            phase = f"joining, {self.waiting}" if self.waiting else "starting"
        elif self.outcome.failures or self.outcome.stopped:
            phase = "stopping"
        else:
            phases = {history.board[local_rank] for local_rank in range(size)}
            phase = "running" if phases <= RUNNING else "starting"
        line = f"{self.spec.name}  {in_minutes(time.monotonic() - history.begun)}  {phase}"
        done = f", {gone} of {size} ranks done" if 0 < gone < size else ""
        return [line + done, *loops(history.board, self.spec.rank_start, size)]

    def _wait(self) -> None:
        try:
            while self._hear():
                pass
        except BaseException as interrupt:  # Ctrl-C, or what another signal handler raised: end the launch first
            self._cancel(interrupt.number if isinstance(interrupt, StopSignal) else signal.SIGTERM)
            self.relay.finish()
            if self.outcome.stacks:
                doing = "; ".join(self.outcome.doing())
                note(interrupt, f"{self.spec.name} was ended by this; {doing}")
            raise
        self.relay.finish()

    def _cancel(self, number: int) -> None:
        """Ends the launch; interrupted again, whether by Ctrl-C or a handler that raises, without more grace."""
        force = over = False
        while not over:
            try:
                self.agent.tell(Cancel(force, number))
                self._hear_out()
                over = True
            except BaseException:
                force = True

    def _hear_out(self) -> None:
        """To the launch's last word, even if this process is too short of files to take in its answers."""
        over = False
        while not over:
            with contextlib.suppress(OSError):
                over = not self._hear()

    def _hear(self) -> bool:
        """Takes in one record; False after the last."""
        self.relay.carry_until(self.agent.fileno())
        try:
            record, fds = self.agent.receive()
        except EOFError:
            self.outcome.broken = self.server.epitaph()
            return False
        if isinstance(record, Reaped):
            if record.exitcode != 0 and not self.outcome.broken:
                self.outcome.broken = f"the agent {describe_exit(record.exitcode)}"
                registry.remove(self.spec.context.environ, self.spec.launch_id)
            return False
        if isinstance(record, RankStarted):
            self.history.started[record.rank] = record
            self.relay.adopt(record.rank, record.rank - self.spec.rank_start, fds)
        elif isinstance(record, RankAnswered):
            self._take_answer(record, fds[0])
        elif isinstance(record, RankGone):
            self.history.gone[record.rank] = record
            self._take_end(record, fds[0])
        elif isinstance(record, Value):
            self.outcome.values.update((record.rank, fd) for fd in fds)
        elif isinstance(record, RanksStarting):
            self.history.board = Board(self.spec.local_size, fds[0])
        else:
            self._take_news(record)
        return True

    def _take_news(self, record: object) -> None:
        """Of what is no rank's beginning, answer or end."""
        if isinstance(record, RankStacks):
            self.outcome.stacks[record.rank] = record
        elif isinstance(record, DeadlinePassed):
            self.outcome.late = not self.outcome.failures
        elif isinstance(record, ServerGone):
            self.outcome.failures.append(failures.of_server(record.pid, record.exitcode, record.at))
        elif isinstance(record, Waiting):
            text = f"{self.spec.name} waits for its other machines, {record.text}"
            self.waiting = record.text
            self.relay.say(text)
        elif isinstance(record, Refused):
            self.outcome.refused = record
        elif isinstance(record, RankFailure):  # of another machine, whose clock is not ours
            self.outcome.failures.append(dataclasses.replace(record, at=time.monotonic()))
        elif isinstance(record, AgentFailed):
            self.outcome.broken = f"the agent failed:\n{record.traceback}"

    def _take_answer(self, record: RankAnswered, memfd: int) -> None:
        if record.kind is Kind.VALUE:
            self.outcome.values[record.rank] = memfd
            return
        remote: RemoteError = payload.read(memfd)
        os.close(memfd)
        self.outcome.raised[record.rank] = remote
        self.outcome.failures.append(failures.of_answer(record, remote))

    def _take_end(self, record: RankGone, crash_fd: int) -> None:
        crash = _read_crash(crash_fd)
        if record.stopped:
            self.outcome.stopped.append(record.rank)
        if record.exitcode == 0 and not record.answered:
            self.outcome.silent.append(record.rank)
        if record.exitcode == 0 or record.stopped or record.rank in self.outcome.raised:
            return
        local_rank = record.rank - self.spec.rank_start
        kind = self.spec.device_type
        device = kind if kind in {"cpu", ""} else f"{kind}:{local_rank}"
        self.outcome.failures.append(failures.of_end(record, device, crash))


def _read_crash(fd: int) -> str:
    """What faulthandler wrote before a rank died, less what lies above the user's code; "" if it did not crash."""
    with open(fd, encoding="utf-8", errors="replace") as file:
        file.seek(0)
        lines = file.read().splitlines()
    kept: list[str] = []
    ours = False
    for line in itertools.takewhile(lambda line: not line.startswith("Extension modules"), lines):
        ours = line.startswith("  File") and (ours or _RUNTIME in line)
        kept += [] if ours else [line]
    return "\n".join(kept).strip()
