"""From when the times of a trace count, for each of its ranks, and how far they may be wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mlaunch.base.text import ranges
from mlaunch.caller.report.clocks import RankTime
from mlaunch.caller.report.records import LaunchRecord


class TraceTimes:
    """``parts``: the files of the ranks that have one, written at about the time that they are of.

    ``zero``: seconds of the epoch at which times are 0, by the clock of rank 0's machine; ``of``: by that of a rank's.
    """

    def __init__(self, report: LaunchRecord, parts: Mapping[int, str]) -> None:
        self.zero = report.begun
        self.of = {rank.rank: RankTime(report.begun) for rank in report.ranks}
        self._hosts = {rank.rank: rank.host or report.host for rank in report.ranks}
        self._parts = parts
        clocks = report.clocks
        if clocks is not None and clocks.compared:
            self.zero = clocks.zero
            for rank in self.of:
                self.of[rank] = clocks.of(rank, os.stat(parts[rank]).st_mtime if rank in parts else self.zero)
        elif (clocks is not None and clocks.by_hand) or len(set(self._hosts.values())) > 1:
            self.of = {rank: RankTime(report.begun, error=None) for rank in self.of}

    def told(self) -> list[dict[str, Any]]:
        """Returns what a reader of the file may want to know of the clocks of its machines."""
        found: dict[tuple[str, float | None], list[int]] = {}
        for rank in self._parts:
            found.setdefault((self._hosts[rank], self.of[rank].error), []).append(rank)
        return [
            {"host": host, "ranks": ranges(ranks, ","), "error_ms": None if error is None else round(error * 1e3, 4)}
            for (host, error), ranks in found.items()
        ]

    @property
    def error(self) -> float:
        """The largest of those that are known."""
        return max((self.of[rank].error or 0.0 for rank in self._parts), default=0.0)

    @property
    def unknown(self) -> list[int]:
        """The ranks whose clock nobody has compared."""
        return [rank for rank in self._parts if self.of[rank].error is None]
