"""What a launch's records and board say of its course, kept for its report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mlaunch.base.errors import describe_exit
from mlaunch.caller.outcome import Outcome
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.records import RankReport, Span
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Phase, RankGone, RanksStarting, RankStarted

# What begins with each phase of a rank, in the words of a report.
_NAMES = {
    Phase.BINDING: "rendezvous",
    Phase.RECEIVING: "receive",
    Phase.RUNNING: "run",
    Phase.COMMANDED: "run",
    Phase.ANSWERING: "send",
    Phase.FAILING: "send",
    Phase.RETURNED: "wait",
    Phase.LEAVING: "stop",
}


_WARM = 0.05  # seconds: a fork server that was warm has imported nothing


@dataclass
class History:
    """``begun``: when the call began; ``ready``: when the fork server had imported torch. Monotonic seconds."""

    begun: float = field(default_factory=time.monotonic)
    ready: float = 0.0
    started: dict[int, RankStarted] = field(default_factory=dict)
    gone: dict[int, RankGone] = field(default_factory=dict)
    board: Board | None = None

    def take(self, record: object, fds: Sequence[int]) -> None:
        """Takes in what a record of the agent's says of the launch's course."""
        if isinstance(record, RanksStarting):
            self.board = Board(fds[0])
        elif isinstance(record, RankStarted):
            self.started[record.rank] = record
        elif isinstance(record, RankGone):
            self.gone[record.rank] = record

    def close(self) -> None:
        if self.board is not None:
            self.board.close()

    def report(self, outcome: Outcome, printed: Mapping[int, bytes] | None) -> LaunchReport:
        """Reports what has happened so far. ``printed``: the end of each rank's output; None: it is not known."""
        spec = outcome.spec
        ranks = tuple(self._rank(outcome, rank) for rank in sorted(self.started))
        return LaunchReport(
            name=spec.name,
            host=os.uname().nodename,
            seconds=time.monotonic() - self.begun,
            restart_count=spec.restart_count,
            world_size=spec.world_size,
            ranks=ranks,
            log_dir=outcome.log_dir,
            printed=printed,
        )

    def _rank(self, outcome: Outcome, rank: int) -> RankReport:
        spec, gone, value = outcome.spec, self.gone.get(rank), outcome.values.get(rank)
        told = next((failure.what for failure in outcome.failures if failure.rank == rank), None)
        if told is not None:
            end = told.partition("\n")[0]
        elif gone is None:  # a rank that stays
            end = "returned" if value is not None else "was stopped" if rank in outcome.stopped else "unknown"
        elif gone.stopped:
            end = "was stopped"
        else:
            end = "returned" if gone.exitcode == 0 else describe_exit(gone.exitcode)
        return RankReport(
            rank=rank,
            pid=self.started[rank].pid,
            device=spec.device(rank - spec.rank_start),
            spans=tuple(self._spans(rank, rank - spec.rank_start)),
            peak_memory=gone.peak_memory if gone is not None else 0,
            returned=None if value is None else value.size,
            end=end,
        )

    def _spans(self, rank: int, local_rank: int) -> Iterator[Span]:
        times = self.board.times(local_rank, since=self.begun) if self.board is not None else []
        begun = [("import", self.begun), ("start", self.ready)]
        begun += [(_NAMES[phase], at) for at, phase in times if phase in _NAMES]
        over = self.gone[rank].at if rank in self.gone else time.monotonic()
        for (phase, start), (_, end) in zip(begun, [*begun[1:], ("", over)], strict=True):
            if phase != "import" or end - start > _WARM:
                yield Span(phase, start - self.begun, max(start, end) - self.begun)
