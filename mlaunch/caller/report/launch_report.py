"""The report of a launch: the phases, the memory and the end of each of this machine's ranks.

Its history, from the agent's records and the board, is kept for that.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from mlaunch.base.exceptions import describe_exit
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import in_bytes, in_seconds, name_ranks
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.core import load
from mlaunch.protocol import launch_files
from mlaunch.protocol.board import Board, ReportRing, in_order, read_times
from mlaunch.protocol.messages import AgentSays, Phase, RankGone, RanksStarting, RankStarted
from mlaunch.protocol.server_messages import BoardFds
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.slow.wire import SlowRanks

PHASES = ("import", "start", "rendezvous", "receive", "run", "send", "wait", "stop")
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


@frozen_record
class Span:
    """A phase of a rank, from ``start`` to ``end`` in seconds since the call began.

    "import": the fork server imports torch, once for all ranks and calls; "start": from there to the rank's own first
    step; "rendezvous": it binds its device and joins the group; "receive": it reads function and arguments; "run";
    "send": it pickles its value, or its exception; "wait": for the others to return; "stop": it shuts down, until
    it was reaped.
    """

    phase: str
    start: float
    end: float


@frozen_record
class RankReport:
    """One rank of this machine.

    Attributes:
        rank: Global rank.
        pid: The process.
        device: "cpu", "cuda:1".
        spans: Its phases, in order, without those that it did not reach.
        peak_memory: The most physical memory that it held, in bytes; 0 while it lives.
        returned: The size of its pickled value in bytes; None without one.
        end: "returned", or as in ``RankFailure.what``.
        host: The machine, if an engine has placed it; "" on this machine.
        place: The CPUs that it was bound to: "node 1, CPUs 24-47"; "" if it was not.
    """

    rank: int
    pid: int
    device: str
    spans: tuple[Span, ...]
    peak_memory: int
    returned: int | None
    end: str
    host: str = ""
    place: str = ""

    def seconds(self, phase: str) -> float | None:
        """Return how long a phase took; None if the rank did not reach it."""
        found = [span.end - span.start for span in self.spans if span.phase == phase]
        return sum(found) if found else None


@frozen_record
class Stopped:
    """The ranks were asked to stop, and have agreed where.

    Attributes:
        reason: What ``mlaunch.stopping()`` returned: "TERM", "asked".
        asked: The time of the request, in seconds of the epoch.
        step: The call of ``mlaunch.stopping()`` at which all ranks stopped, from 1.
    """

    reason: str
    asked: float
    step: int

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.asked))
        return f"stopped at step {self.step}, as asked at {at} ({self.reason})"


@frozen_record
class LaunchReport:
    """The report of a call, ``train.last``: printed, a table; in a notebook, a table and a timeline.

    Attributes:
        name: The function's.
        host: This machine.
        seconds: From the call to its end.
        restart_count: The number of attempts that failed before this one.
        world_size: Ranks of all machines.
        ranks: This machine's ranks, in order.
        log_dir: The directory of their output; None if it was not written, or they have printed nothing.
        begun: The time of the call, in seconds of the epoch.
        stopped: If the ranks were asked to stop (``mlaunch.stopping``): why, when, and where they did; else None.
        slow_ranks: The ranks for which the others have waited, with ``slow=``; None: there were none.
    """

    name: str
    host: str
    seconds: float
    restart_count: int
    world_size: int
    ranks: tuple[RankReport, ...]
    log_dir: str | None = None
    printed: Mapping[int, bytes] | None = field(default=None, repr=False, compare=False)
    stopped: Stopped | None = None
    slow_ranks: SlowRanks | None = None
    begun: float = 0.0

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        left = len(rows[0]) - 1
        lines = []
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[:left], widths[:left], strict=True)]
            lines.append("  ".join([*cells, row[left]]))
        noted = [str(fact) for fact in (self.stopped, self.slow_ranks) if fact is not None]
        return "\n".join([self.title, *noted, *lines, *([f"output in {self.log_dir}"] if self.log_dir else [])])

    __repr__ = __str__  # at a prompt, where only repr() shows

    @property
    def title(self) -> str:
        """The report in one line."""
        size = len(self.ranks)
        ranks = f"{size} rank{'s' * (size != 1)}" + (f" of {self.world_size}" if self.world_size != size else "")
        again = f", restart {self.restart_count}" if self.restart_count else ""
        return f"{self.name}  {ranks} on {self.host}, {self.seconds:.3g} s{again}"

    def rows(self) -> list[Sequence[str]]:
        """Return the table: a head, then a row for each rank."""
        phases = [phase for phase in PHASES if any(rank.seconds(phase) is not None for rank in self.ranks)]
        hosts = len({rank.host for rank in self.ranks}) > 1
        placed = any(rank.place for rank in self.ranks)
        where = [*(["host"] if hosts else []), "pid", "device", *(["place"] if placed else [])]
        head = ["rank", *where, *phases, "peak memory", "value", "end"]
        return [head, *(_cells(rank, phases, hosts=hosts, placed=placed) for rank in self.ranks)]

    def output(self, rank: int) -> str:
        """Return the latest lines that a rank of this machine printed, whether they were shown or not.

        From both its streams, without prefix; of a redrawn line, the last version. At most 64 KiB, less with more than
        16 ranks; ``log_dir`` keeps all.

        Raises:
            LookupError: No such rank was started on this machine.
            ValueError: With ``output="raw"``, the rank printed straight into the caller's streams.
        """
        ranks = [known.rank for known in self.ranks]
        if rank not in ranks:
            here = name_ranks(ranks) if ranks else "none"
            raise LookupError(f"rank {rank} of {self.name} was not started on {self.host}; started here: {here}")
        if self.printed is None:
            raise ValueError(
                f"what rank {rank} of {self.name} printed is not known: with output='raw' it goes straight into the "
                f"caller's streams; allowed: 'all', 'rank0' or 'none', which keep its end"
            )
        return self.printed.get(rank, b"").decode(errors="replace")

    def as_dict(self) -> dict[str, Any]:
        """Return the report for programs, ready for JSON; ``docs/schema.json`` has the fields (``report``)."""
        from mlaunch._version import SCHEMA

        ranks = [
            dataclasses.asdict(rank) | {"host": rank.host or None, "place": rank.place or None} for rank in self.ranks
        ]
        noted = {"stopped": self.stopped, "slow_ranks": self.slow_ranks}
        facts = {name: None if fact is None else dataclasses.asdict(fact) for name, fact in noted.items()}
        names = ("host", "seconds", "begun", "restart_count", "world_size", "log_dir")
        known = {name: getattr(self, name) for name in names}
        return {"schema": SCHEMA, "function": self.name, **known, **facts, "ranks": ranks}

    def _repr_html_(self) -> str | None:
        """Return a table and a timeline for a notebook; None: it prints the report."""
        drawn = load.at_hand("display", "caller.timeline")
        return None if drawn is None else str(drawn.html(self))

    def to_svg(self) -> str:
        """Return the timeline as an SVG picture."""
        return str(_timeline("to_svg()").svg(self))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for https://ui.perfetto.dev and chrome://tracing. OSError as for any file."""
        _timeline("to_chrome_trace()").write_trace(self, path)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline with matplotlib. ImportError without it (extra: notebook)."""
        _timeline("save_png()").save_png(self, path)


def _timeline(asked: str) -> Any:
    return load.room("display", "caller.timeline", asked)


def _cells(rank: RankReport, phases: Sequence[str], *, hosts: bool, placed: bool) -> list[str]:
    times = [rank.seconds(phase) for phase in phases]
    return [
        str(rank.rank),
        *([rank.host] if hosts else []),
        str(rank.pid),
        rank.device,
        *([rank.place] if placed else []),
        *("" if seconds is None else in_seconds(seconds) for seconds in times),
        in_bytes(rank.peak_memory) if rank.peak_memory else "",
        "" if rank.returned is None else in_bytes(rank.returned),
        rank.end,
    ]


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
        begun, spec, facts = time.time() - now + self.begun, outcome.spec, {**outcome.facts}
        kept = None if outcome.log_dir is None else launch_files.kept(outcome.log_dir)
        return _Once(
            functools.partial(self._report, spec, begun, printed, rows=rows, now=now, log_dir=kept, facts=facts)
        )

    def report_of_values(
        self, spec: LaunchSpec, sizes: Sequence[int], begun: float, printed: Mapping[int, bytes] | None
    ) -> Callable[[], LaunchReport]:
        """Like ``report``, for a call on ranks that stay, all of which have returned; fast: most reports are not read.

        ``sizes``: of their values, in bytes. ``begun``: the beginning of the call, in monotonic seconds.
        """
        board, now = self.board, time.monotonic()
        on_the_clock = time.time() - now + begun
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
            return history._report(spec, on_the_clock, printed, rows=rows, now=now)

        return _Once(make)

    def _report(
        self,
        spec: LaunchSpec,
        begun: float,
        printed: Mapping[int, bytes] | None,
        *,
        rows: Sequence[_Row],
        now: float,
        log_dir: str | None = None,
        facts: Mapping[str, Any] = _NOTHING,
    ) -> LaunchReport:
        """Make a report. ``begun``: when the call began, by the system's clock."""
        return LaunchReport(
            name=spec.call.name,
            host=", ".join(dict.fromkeys(self.hosts.values())) or os.uname().nodename,
            seconds=now - self.begun,
            restart_count=spec.restarts.count,
            world_size=spec.world_size,
            ranks=tuple(self._rank(row, spec, now) for row in rows),
            log_dir=log_dir,
            printed=printed,
            **facts,
            begun=begun,
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
