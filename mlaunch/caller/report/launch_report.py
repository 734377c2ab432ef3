"""The report of a launch, as its caller prints it: what each of this machine's ranks did, when, and at what cost."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import name_ranks
from mlaunch.caller.report.records import LaunchRecord
from mlaunch.core import load


@frozen_record
class LaunchReport(LaunchRecord):
    """What ``train.last`` is after a call: printed, a table; in a notebook, a table and a timeline.

    Attributes:
        name: The function's.
        host: This machine.
        seconds: From the call to its end.
        restart_count: How many attempts failed before this one.
        world_size: Ranks of all machines.
        ranks: This machine's, in their order.
        log_dir: Where their output was written; None where it was not, or they have printed nothing.
        begun: When the call was made, in seconds of the epoch.
        stopped: That the ranks were asked to stop (``mlaunch.stopping``), why, when, and where they did; None: no.
        slow_ranks: Those for which the others have waited, if ``slow=`` asked to be told; None: there were none.
    """

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

    def output(self, rank: int) -> str:
        """Returns the latest lines that a rank of this machine printed, whether they were shown or not.

        Of both its streams, without prefix, a redrawn line as it last looked. At most 64 KiB, less with more than 16
        ranks; ``log_dir`` keeps all.

        Raises:
            LookupError: No such rank was started on this machine.
            ValueError: ``output="raw"``: the rank printed straight into the caller's streams.
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
        """Return the report as programs read it, ready for JSON; ``docs/schema.json`` has the fields (``report``)."""
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
        """Return a table and a timeline for a notebook, which prints the report if there is none."""
        drawn = load.at_hand("display", "caller.timeline")
        return None if drawn is None else str(drawn.html(self))

    def to_svg(self) -> str:
        """Returns the timeline as an SVG picture."""
        return str(_timeline("to_svg()").svg(self))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline for https://ui.perfetto.dev and chrome://tracing. OSError as for any file."""
        _timeline("to_chrome_trace()").write_trace(self, path)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draws the timeline with matplotlib. ImportError without it (extra: notebook)."""
        _timeline("save_png()").save_png(self, path)


def _timeline(asked: str) -> Any:
    return load.room("display", "caller.timeline", asked)
