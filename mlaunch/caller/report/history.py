"""The history of a launch, from its records and its board, kept for its report."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mlaunch.base.exceptions import describe_exit
from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.output import files
from mlaunch.caller.report.launch_report import LaunchReport, RankReport, Span
from mlaunch.protocol.board import Board, ReportRing, in_order, read_times
from mlaunch.protocol.messages import AgentSays, Phase, RankGone, RanksStarting, RankStarted
from mlaunch.protocol.server_messages import BoardFds
from mlaunch.protocol.spec import LaunchSpec

# The names of a rank's phases in a report.
_NAMES = {
    Phase.BINDING: "rendezvous",
    Phase.RECEIVING: "receive",
    Phase.RUNNING: "run",
    Phase.COMMANDED: "run",
    Phase.ANSWERING: "send",
    Phase.FAILING: "send",
    Phase.RETURNED: "wait",
    Phase.IDLE: "wait",
    Phase.LEAVING: "stop",
}


_NOTHING: Mapping[str, Any] = {}
_WARM = 0.05  # seconds: a fork server that was warm has imported nothing


class _Once:
    """A report that is made at its first use. functools.cache would cost a short call too much."""

    def __init__(self, make: Callable[[], LaunchReport]) -> None:
        self._make: Callable[[], LaunchReport] | None = make
        self._made: LaunchReport | None = None

    def __call__(self) -> LaunchReport:
        make = self._make
        if self._made is None and make is not None:
            self._made, self._make = make(), None
        return cast("LaunchReport", self._made)


@dataclass
class History:
    """The history of a launch. ``begun``: the call began; ``ready``: torch was imported; in monotonic seconds."""

    begun: float = field(default_factory=time.monotonic)
    ready: float = 0.0
    started: dict[int, RankStarted] = field(default_factory=dict)
    gone: dict[int, RankGone] = field(default_factory=dict)
    board: Board | None = None
    hosts: dict[int, str] = field(default_factory=dict)  # of ranks that an engine has placed elsewhere

    def take(self, record: AgentSays, fds: Sequence[int]) -> None:
        """Note what a record of the agent says about the launch."""
        if isinstance(record, RanksStarting):
            self.board = Board(BoardFds.of(fds).board)
        elif isinstance(record, RankStarted):
            self.started[record.rank] = record
        elif isinstance(record, RankGone):
            self.gone[record.rank] = record

    def reached(self, size: int) -> float | None:
        """Return the largest of the steps that the ranks have reported last; None: none has reported any."""
        found = [] if self.board is None else [self._latest(self.board.ring(local_rank)) for local_rank in range(size)]
        return max((step for step in found if step is not None), default=None)

    def _latest(self, ring: ReportRing) -> float | None:
        entries, _ = ring.read(max(ring.count() - 1, 0))
        step = json.loads(entries[-1])[0] if entries else None
        return step if isinstance(step, int | float) and not isinstance(step, bool) else None

    def close(self) -> None:
        if self.board is not None:
            self.board.close()

    def report(self, outcome: Outcome, printed: Mapping[int, bytes] | None) -> Callable[[], LaunchReport]:
        """Note what has happened so far; return a function that makes the report of it.

        ``printed``: the end of each rank's output; None: unknown.
        """
        board, start, now = self.board, outcome.spec.rank_start, time.monotonic()
        rows = [
            _Row(
                started,
                self.gone.get(rank),
                _end(outcome, rank, self.gone.get(rank)),
                outcome.values[rank].size if rank in outcome.values else None,
                board.times(rank - start) if board is not None else (),
                board.place(rank - start) if board is not None and outcome.spec.sections else "",
            )
            for rank, started in sorted(self.started.items())
        ]
        return _Once(
            functools.partial(
                self._report, outcome.spec, outcome.log_dir, printed, rows=rows, now=now, facts={**outcome.facts}
            )
        )

    def report_of_values(
        self, spec: LaunchSpec, sizes: Sequence[int], begun: float, printed: Mapping[int, bytes] | None
    ) -> Callable[[], LaunchReport]:
        """Do the same for a call on ranks that stay, all of which have returned; fast, since most reports are not read.

        ``sizes``: of their values, in bytes. ``begun``: the beginning of the call, in monotonic seconds.
        """
        board, now = self.board, time.monotonic()
        times = board.all_times() if board is not None else []
        places = [""] * len(times)
        if board is not None and spec.sections:  # only features place ranks
            places = [board.place(rank) for rank in range(len(times))]

        def make() -> LaunchReport:
            rows = [
                _Row(self.started[rank], None, "returned", size, row, place)
                for rank, (size, row, place) in enumerate(zip(sizes, map(read_times, times), places, strict=True))
            ]
            history = dataclasses.replace(self, begun=begun, ready=begun)
            return history._report(spec, None, printed, rows=rows, now=now)

        return _Once(make)

    def _report(
        self,
        spec: LaunchSpec,
        log_dir: str | None,
        printed: Mapping[int, bytes] | None,
        *,
        rows: Sequence[_Row],
        now: float,
        facts: Mapping[str, Any] = _NOTHING,
    ) -> LaunchReport:
        return LaunchReport(
            name=spec.call.name,
            host=", ".join(dict.fromkeys(self.hosts.values())) or os.uname().nodename,
            seconds=now - self.begun,
            restart_count=spec.restarts.count,
            world_size=spec.world_size,
            ranks=tuple(self._rank(row, spec, now) for row in rows),
            log_dir=files.kept(log_dir),
            printed=printed,
            **facts,
            begun=time.time() - time.monotonic() + self.begun,
        )

    def _rank(self, row: _Row, spec: LaunchSpec, now: float) -> RankReport:
        return RankReport(
            rank=row.started.rank,
            pid=row.started.pid,
            host=self.hosts.get(row.started.rank, ""),
            device=spec.device(row.started.rank - spec.rank_start),
            spans=tuple(self._spans(row, now)),
            peak_memory=row.gone.peak_memory if row.gone is not None else 0,
            returned=row.returned,
            end=row.end,
            place=row.place,
        )

    def _spans(self, row: _Row, now: float) -> Iterator[Span]:
        begun = [("import", self.begun), ("start", self.ready)]
        since = max(self.begun, self.ready)  # before it, ranks that were prepared waited
        begun += [(_NAMES[phase], at) for at, phase in in_order(row.times, since=since) if phase in _NAMES]
        over = row.gone.at if row.gone is not None else now
        for (phase, start), (_, end) in zip(begun, [*begun[1:], ("", over)], strict=True):
            if phase != "import" or end - start > _WARM:
                yield Span(phase, start - self.begun, max(start, end) - self.begun)


@frozen_record
class _Row:
    """The facts of one rank. ``returned``: bytes of its value. ``times``: the beginnings of its phases."""

    started: RankStarted
    gone: RankGone | None
    end: str
    returned: int | None
    times: Sequence[float]
    place: str = ""


def _end(outcome: Outcome, rank: int, gone: RankGone | None) -> str:
    """Return how a rank has ended, or its call if it stays."""
    told = next((failure.what for failure in outcome.failures if failure.rank == rank), None)
    if told is not None:
        return told.partition("\n")[0]
    if gone is None:  # a rank that stays
        return "returned" if rank in outcome.values else "was stopped" if rank in outcome.stopped else "unknown"
    if gone.stopped:
        return "was stopped"
    return "returned" if not gone.failed else describe_exit(gone.exitcode, of_python=gone.of_python)
