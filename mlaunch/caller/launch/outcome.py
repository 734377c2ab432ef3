"""The outcome of a launch, as far as it is known; it grows with each record of the launch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.base.frames import in_letters, is_control_thread, mentions_bottom
from mlaunch.base.text import name_ranks
from mlaunch.caller.report.failure_text import summarise
from mlaunch.protocol import failures, launch_files
from mlaunch.protocol.messages import (
    AgentFailed,
    AgentSays,
    AnswerKind,
    DeadlinePassed,
    RankAnswered,
    RankGone,
    RanksStarting,
    RankStacks,
    RankStarted,
    Reaped,
    Refused,
    RemoteError,
    ServerGone,
)
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.spec import LaunchSpec


@dataclass
class Outcome:
    """Values and failures of one launch, by global rank."""

    spec: LaunchSpec
    log_dir: str | None = None
    hosts: dict[int, str] = field(default_factory=dict)  # of ranks that an engine has placed on other machines
    values: dict[int, Payload] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    late_ends: list[RankFailure] = field(default_factory=list)  # of ranks that had answered: no value is lost
    raised: dict[int, RemoteError] = field(default_factory=dict)
    started: dict[int, RankStarted] = field(default_factory=dict)  # ranks of this machine
    silent: list[int] = field(default_factory=list)  # ranks that ended well without a value
    recorded: dict[int, dict[str, Any]] = field(default_factory=dict)  # what ranks wrote into their error files
    stopped: set[int] = field(default_factory=set)  # ranks that the agent ended or called back
    stacks: dict[int, RankStacks] = field(default_factory=dict)
    broken: str = ""  # the cause outside its ranks that ended the launch
    refused: Refused | None = None
    stale: str = ""  # modules, with commas and times, of which ranks that stay run older code than their files hold
    leaving: bool = False  # ranks that stay were asked to leave
    late: bool = False  # the deadline passed before any failure
    facts: dict[str, object] = field(default_factory=dict)  # of features, for the report, by its fields
    interrupt: BaseException | None = None  # Ctrl-C, or what another signal handler raised

    def take(self, record: AgentSays, fds: Sequence[int]) -> None:
        """Take in a record of the agent, with its descriptors if it needs them."""
        taker = _TAKERS.get(type(record))
        if taker is not None:
            taker(self, record, fds)

    def interrupted_by(self, interrupt: BaseException) -> None:
        """Take in Ctrl-C, or an exception of another signal handler. The first one counts."""
        self.interrupt = self.interrupt or interrupt

    def broken_by(self, why: str, *, late: bool = False) -> None:
        """Take in a cause outside its ranks that has ended the launch. The first one counts.

        ``late``: it came after the deadline.
        """
        self.broken, self.late = self.broken or why, self.late or late

    @property
    def failed(self) -> bool:
        """True if there will be an error instead of values."""
        return bool(self.failures or self.stopped or self.broken or self.refused or self.interrupt)

    @property
    def ranks_here(self) -> range:
        return range(self.spec.rank_start, self.spec.rank_start + self.spec.local_world_size)

    def doing(self) -> list[str]:
        """Return what ranks were doing when they were stopped, and which ranks had left before."""
        left = sorted(set(self.silent) - self.stopped)
        how = "had exited with code 0" + (" without returning a value" if self.spec.target is None else "")
        return [*summarise(self.stacks.values()), *([f"{name_ranks(left)} {how}"] if left else [])]

    def close(self) -> None:
        for value in self.values.values():
            value.close()
        self.values = {}

    def _take_start(self, record: RanksStarting, _fds: Sequence[int]) -> None:
        """Take in the facts that only all machines together know."""
        self.spec = dataclasses.replace(
            self.spec, launch_id=record.launch_id, rank_start=record.rank_start, world_size=record.world_size
        )

    def _take_rank(self, record: RankStarted, _fds: Sequence[int]) -> None:
        self.started[record.rank] = record

    def _take_answer(self, record: RankAnswered, fds: Sequence[int]) -> None:
        # Not unpickled here: that runs user code, for which neither the order nor the lock of this code is made.
        content = Payload(record.data, *fds)
        self.stale = self.stale or record.stale
        if record.kind is AnswerKind.VALUE:
            self.values[record.rank] = content
            return
        if record.kind is AnswerKind.INTERRUPTED:
            content.close()
            self.stopped.add(record.rank)
            return
        remote: RemoteError = content.read()
        content.close()
        self.raised[record.rank] = remote
        self.failures.append(failures.from_answer(record, remote))

    def _take_end(self, record: RankGone, fds: Sequence[int]) -> None:
        crash = self._read_crash(record.rank, fds[0])
        if record.stopped:
            self.stopped.add(record.rank)
        if not record.failed and not (self.spec.stays and self._should_have_stayed()):
            self.silent += [] if record.answered else [record.rank]
            return
        if record.stopped or record.rank in self.raised:
            return
        if self.spec.stays and record.rank not in self.values:  # its last answer was to the call before
            record = dataclasses.replace(record, answered=False)
        device = self.spec.device(record.rank - self.spec.rank_start)
        failure = failures.from_exit(record, device, crash, self.hosts.get(record.rank, ""))
        costs = self.spec.stays or record.rank not in self.values
        (self.failures if costs else self.late_ends).append(failure)

    def _should_have_stayed(self) -> bool:
        """True if ranks that stay were not asked to leave, and no failure before explains that they did."""
        failed = any(not failure.consequence for failure in self.failures)
        return not (self.leaving or failed or self.stopped or self.broken)

    def _read_crash(self, rank: int, fd: int) -> str:
        """Return what is known of a rank's crash: its stacks, or the record in its error file; "" if neither."""
        try:
            text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        finally:
            os.close(fd)
        if not text:
            return ""
        record = launch_files.parse_error(text)
        if record is None:
            return _without_ours(in_letters(text))
        self.recorded[rank] = record
        return launch_files.traceback_of_error(record) or ""

    def _take_stacks(self, record: RankStacks, _fds: Sequence[int]) -> None:
        self.stacks[record.rank] = record

    def _take_deadline(self, _record: DeadlinePassed, _fds: Sequence[int]) -> None:
        # A rank of another machine may lose its peers to it, and say so before that machine has passed its own.
        self.late = self.late or all(failure.consequence or failure.late for failure in self.failures)

    def _take_server(self, record: ServerGone, _fds: Sequence[int]) -> None:
        self.failures.append(failures.from_server(record.pid, record.exitcode, record.at))

    def _take_refusal(self, record: Refused, _fds: Sequence[int]) -> None:
        self.refused = record

    def _take_failure(self, record: RankFailure, _fds: Sequence[int]) -> None:
        """Take in a failure on another machine, whose clock differs."""
        self.failures.append(dataclasses.replace(record, at=time.monotonic()))

    def _take_agents_failure(self, record: AgentFailed, _fds: Sequence[int]) -> None:
        self.broken = f"the agent failed:\n{record.traceback}"

    def _take_last_word(self, record: Reaped, _fds: Sequence[int]) -> None:
        if record.exitcode != 0 and not self.broken:
            self.broken = f"the agent {describe_exit(record.exitcode)}"


_TAKERS: dict[type, Callable[[Outcome, Any, Sequence[int]], None]] = {
    RanksStarting: Outcome._take_start,
    RankStarted: Outcome._take_rank,
    RankAnswered: Outcome._take_answer,
    RankGone: Outcome._take_end,
    RankStacks: Outcome._take_stacks,
    DeadlinePassed: Outcome._take_deadline,
    ServerGone: Outcome._take_server,
    Refused: Outcome._take_refusal,
    RankFailure: Outcome._take_failure,
    AgentFailed: Outcome._take_agents_failure,
    Reaped: Outcome._take_last_word,
}


def _without_ours(crash: str) -> str:
    """Return the stacks that faulthandler wrote when a rank died, without the launcher's frames and its own thread."""
    threads: list[list[str]] = [[]]
    ours = False
    for line in itertools.takewhile(lambda line: not line.startswith("Extension modules"), crash.splitlines()):
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        ours = line.startswith("  File") and (ours or mentions_bottom(line))
        threads[-1] += [] if ours else [line]
    return "\n".join(line for lines in threads if not is_control_thread(lines) for line in lines).strip()
