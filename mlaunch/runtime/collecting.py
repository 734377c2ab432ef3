"""What a launch says until its last process is gone, and what the caller gets of it: values or an exception."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from mlaunch.errors import (
    LaunchError,
    LaunchTimeout,
    RankFailure,
    Report,
    describe_exit,
    in_order,
    meanwhile,
    warn_caller,
)
from mlaunch.output.relay import Relay
from mlaunch.runtime import directory, payload, recorded, reporting, stacks
from mlaunch.runtime.channel import Channel
from mlaunch.runtime.messages import (
    AgentFailed,
    Cancel,
    DeadlinePassed,
    Kind,
    RankAnswered,
    RankGone,
    RankStacks,
    RankStarted,
    Reaped,
    Refused,
    RemoteError,
    ServerGone,
    Value,
    Waiting,
)
from mlaunch.runtime.spec import LaunchSpec
from mlaunch.runtime.starting import ForkServer

_RUNTIME = os.path.dirname(__file__) + os.sep


class StopSignal(BaseException):
    """A signal to this process, which its ranks are to get as well."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Launch:
    """A launch as its caller sees it."""

    spec: LaunchSpec
    server: ForkServer
    agent: Channel
    relay: Relay | None = None
    values: dict[int, int] = field(default_factory=dict)  # rank -> memfd
    failures: list[RankFailure] = field(default_factory=list)
    raised: dict[int, RemoteError] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)  # ranks that ended well without a value
    broken: str = ""  # what ended the launch outside its ranks
    refused: Refused | None = None
    stopped: list[int] = field(default_factory=list)  # ranks that the agent ended
    late: bool = False  # the deadline passed before any failure
    stacks: dict[int, RankStacks] = field(default_factory=dict)

    def collect(self) -> list[Any]:
        """Waits for the launch's last process; then its results, or the exception of its first failure."""
        try:
            self._wait()
            if self.relay is not None:
                self.relay.finish()
            if self.refused is not None:
                kind = LaunchTimeout if self.refused.late else LaunchError
                raise kind(f"{self.spec.name} was not started: {self.refused.text}")
            if self.late and self.stopped:
                self._raise_timeout()
            if self.broken and not self.failures:
                raise self._error(LaunchError, f"{self.spec.name} was ended: {self.broken}")
            if self.failures:
                self._raise()
            return self._return()
        finally:
            for memfd in self.values.values():
                os.close(memfd)
            self.agent.close()
            if self.relay is not None:
                self.relay.close()

    def _wait(self) -> None:
        try:
            while self._hear():
                pass
        except BaseException as interrupt:  # Ctrl-C, or what another signal handler raised: end the launch first
            self._cancel(interrupt.number if isinstance(interrupt, StopSignal) else signal.SIGTERM)
            if self.relay is not None:
                self.relay.finish()
            if self.stacks:
                doing = "; ".join(stacks.summarise(self.stacks.values()))
                _note(interrupt, f"{self.spec.name} was ended by this; {doing}")
            raise

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
        if self.relay is not None:
            self.relay.carry_until(self.agent.fileno())
        try:
            record, fds = self.agent.receive()
        except EOFError:
            self.broken = self.server.epitaph()
            return False
        if isinstance(record, Reaped):
            if record.exitcode != 0 and not self.broken:
                self.broken = f"the agent {describe_exit(record.exitcode)}"
                directory.remove(self.spec.context.environ, self.spec.launch_id)
            return False
        if isinstance(record, RankStarted):
            if self.relay is not None:
                self.relay.adopt(record.rank, record.rank - self.spec.rank_start, fds)
        elif isinstance(record, RankAnswered):
            self._take_answer(record, fds[0])
        elif isinstance(record, RankGone):
            self._take_end(record, fds[0])
        elif isinstance(record, Value):
            self.values.update((record.rank, fd) for fd in fds)
        else:
            self._take_news(record)
        return True

    def _take_news(self, record: object) -> None:
        """Of what is no rank's beginning, answer or end."""
        if isinstance(record, RankStacks):
            self.stacks[record.rank] = record
        elif isinstance(record, DeadlinePassed):
            self.late = not self.failures
        elif isinstance(record, ServerGone):
            self.failures.append(reporting.of_server(record.pid, record.exitcode, record.at))
        elif isinstance(record, Waiting):
            text = f"mlaunch: {self.spec.name} waits for its other machines, {record.text}"
            print(text, file=sys.stderr, flush=True)
        elif isinstance(record, Refused):
            self.refused = record
        elif isinstance(record, RankFailure):  # of another machine, whose clock is not ours
            self.failures.append(dataclasses.replace(record, at=time.monotonic()))
        elif isinstance(record, AgentFailed):
            self.broken = f"the agent failed:\n{record.traceback}"

    def _take_answer(self, record: RankAnswered, memfd: int) -> None:
        if record.kind is Kind.VALUE:
            self.values[record.rank] = memfd
            return
        remote: RemoteError = payload.read(memfd)
        os.close(memfd)
        self.raised[record.rank] = remote
        self.failures.append(reporting.of_answer(record, remote))

    def _take_end(self, record: RankGone, crash_fd: int) -> None:
        crash = _read_crash(crash_fd)
        if record.stopped:
            self.stopped.append(record.rank)
        if record.exitcode == 0 and not record.answered:
            self.silent.append(record.rank)
        if record.exitcode == 0 or record.stopped or record.rank in self.raised:
            return
        local_rank = record.rank - self.spec.rank_start
        kind = self.spec.device_type
        device = kind if kind in {"cpu", ""} else f"{kind}:{local_rank}"
        told = crash or recorded.error_of(self.spec, local_rank)
        self.failures.append(reporting.of_end(record, device, told))

    def _results(self) -> dict[int, Any]:
        results = {}
        for rank, memfd in self.values.items():
            with contextlib.suppress(Exception):  # what a __setstate__ may raise; the failure itself is told
                results[rank] = payload.read(memfd)
        return results

    def _return(self) -> list[Any]:
        if self.silent and self.spec.command is None:
            ranks = ", ".join(map(str, sorted(self.silent)))
            warn_caller(
                f"{len(self.silent)} of {self.spec.local_size} ranks of {self.spec.name} exited with code 0 "
                f"without returning a value (ranks {ranks}); their results are None"
            )
        wanted = range(self.spec.world_size) if self.spec.gather_all else self._ranks_here()
        return [self._value(rank) if rank in self.values else None for rank in wanted]

    def _value(self, rank: int) -> Any:
        try:
            return payload.read(self.values[rank])
        except Exception as error:
            raise LaunchError(
                f"the value that rank {rank} of {self.spec.name} returned cannot be unpickled here: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _stack_texts(self) -> dict[int, str]:
        return {rank: dump.text for rank, dump in self.stacks.items() if dump.text}

    def _raise_timeout(self) -> None:
        silent = [rank for rank in self.stopped if rank not in self.values]
        who = f"{stacks.name_ranks(silent)} had not returned"
        if not silent:
            who = f"{stacks.name_ranks(self.stopped)} had returned but not ended"
        lines = [
            f"{self.spec.name} did not finish within its deadline of {self.spec.deadline:g} s; {who}",
            *meanwhile(stacks.summarise(self.stacks.values())),
        ]
        raise self._error(LaunchTimeout, "\n".join(lines))

    def _error(self, kind: type[LaunchError], text: str) -> LaunchError:
        error = kind(text, self.failures, self._results(), self._stack_texts())
        error.log_dir = self.relay.directory if self.relay is not None else None
        return error

    def _ranks_here(self) -> range:
        return range(self.spec.rank_start, self.spec.rank_start + self.spec.local_size)

    def _raise(self) -> None:
        self.failures = in_order(self.failures)
        cause = self.failures[0]
        text = Report(self.spec.name, self.failures, stacks.summarise(self.stacks.values()))
        report = self._error(LaunchError, str(text))
        remote = self.raised.get(cause.rank) if cause.rank is not None else None
        if remote is None or remote.pickled is None:
            raise report
        try:
            error: BaseException = pickle.loads(remote.pickled)
        except Exception:  # its class does not exist here, or cannot be made: the text must do
            raise report from None
        _note(error, f"raised by {cause.who} of {self.spec.name} ({cause.place})")
        raise error from report


def _note(error: BaseException, text: str) -> None:
    """As ``add_note``, which an exception with a ``__setattr__`` of its own may refuse, and Python 3.10 lacks."""
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), text])


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
