"""The report of a launch: what each of this machine's ranks did, when, and at what cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = ("import", "start", "rendezvous", "receive", "run", "send", "wait", "stop")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class RankReport:
    """One rank of this machine.

    Attributes:
        rank: Global rank.
        pid: Its process.
        device: "cpu", "cuda:1".
        spans: Its phases, in order; those that it did not come to are missing.
        peak_memory: The most physical memory that it held, in bytes.
        returned: The size of its pickled value in bytes; None without one.
        end: "returned", or as in ``RankFailure.what``.
    """

    rank: int
    pid: int
    device: str
    spans: tuple[Span, ...]
    peak_memory: int
    returned: int | None
    end: str

    def seconds(self, phase: str) -> float | None:
        """How long a phase took; None if the rank did not come to it."""
        found = [span.end - span.start for span in self.spans if span.phase == phase]
        return sum(found) if found else None


@dataclass(frozen=True)
class LaunchReport:
    """What ``train.last`` is after a call: printed, a table; in a notebook, a table and a timeline.

    Attributes:
        name: The function's.
        host: This machine.
        seconds: From the call to its end.
        restart_count: How many attempts failed before this one.
        world_size: Ranks of all machines.
        ranks: This machine's, in their order.
        log_dir: Where their output was written; None where it was not.
    """

    name: str
    host: str
    seconds: float
    restart_count: int
    world_size: int
    ranks: tuple[RankReport, ...]
    log_dir: str | None = None

    @property
    def title(self) -> str:
        size = len(self.ranks)
        ranks = f"{size} rank{'s' * (size != 1)}" + (f" of {self.world_size}" if self.world_size != size else "")
        again = f", restart {self.restart_count}" if self.restart_count else ""
        return f"{self.name}  {ranks} on {self.host}, {self.seconds:.3g} s{again}"

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        left = len(rows[0]) - 1
        lines = []
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[:left], widths[:left], strict=True)]
            lines.append("  ".join([*cells, row[left]]))
        return "\n".join([self.title, *lines, *([f"output in {self.log_dir}"] if self.log_dir else [])])

    def rows(self) -> list[Sequence[str]]:
        """The table: a head, then a row for each rank."""
        phases = [phase for phase in PHASES if any(rank.seconds(phase) is not None for rank in self.ranks)]
        head = ["rank", "pid", "device", *phases, "peak memory", "value", "end"]
        return [head, *([*_cells(rank, phases)] for rank in self.ranks)]

    def _repr_html_(self) -> str:
        from mlaunch.caller.report.timeline import html

        return html(self)

    def to_svg(self) -> str:
        """The timeline as an SVG picture."""
        from mlaunch.caller.report.timeline import svg

        return svg(self)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline for https://ui.perfetto.dev and chrome://tracing. OSError as for any file."""
        from mlaunch.caller.report.timeline import write_trace

        write_trace(self, path)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draws the timeline with matplotlib. ImportError without it (extra: notebook)."""
        from mlaunch.caller.report.timeline import save_png

        save_png(self, path)


def _cells(rank: RankReport, phases: Sequence[str]) -> list[str]:
    times = [rank.seconds(phase) for phase in phases]
    return [
        str(rank.rank),
        str(rank.pid),
        rank.device,
        *("" if seconds is None else in_seconds(seconds) for seconds in times),
        in_bytes(rank.peak_memory),
        "" if rank.returned is None else in_bytes(rank.returned),
        rank.end,
    ]


def in_seconds(seconds: float) -> str:
    """ "850 ms", "12.3 s"."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def in_bytes(size: float) -> str:
    """ "12 KiB", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
