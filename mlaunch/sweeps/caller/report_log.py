"""The reports of a submitted launch's ranks (``mlaunch.report``), in the caller."""

from __future__ import annotations

import contextlib
import json
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlaunch.base.fds import renewed
from mlaunch.base.log import log
from mlaunch.protocol.board import Board
from mlaunch.protocol.spec import LaunchSpec

_PERIOD = 0.1  # seconds between two reads, if there are callbacks
_KEPT = 10_000  # reports


@dataclass(frozen=True)
class Reported:
    """A report of one rank: ``reported["loss"]``."""

    rank: int
    step: int
    values: Mapping[str, float | int | str | bool | None]

    def __getitem__(self, name: str) -> float | int | str | bool | None:
        return self.values[name]


def in_words(reported: Reported | None) -> str:
    """Return a report in words: "step 3, loss 0.25"; "" for none."""
    if reported is None:
        return ""
    values = [f"{name} {f'{one:.6g}' if isinstance(one, float) else one}" for name, one in reported.values.items()]
    return ", ".join([f"step {reported.step}", *values])


class _Columns:
    """Reports of a run that is over, in a tenth of the memory: a sweep keeps those of all its runs.

    Reports with the same names are rows of one table; ``kinds`` has each report's table.
    """

    def __init__(self, reports: Sequence[Reported]) -> None:
        tables: dict[tuple[str, ...], list[Reported]] = {}
        for report in reports:
            tables.setdefault(tuple(report.values), []).append(report)
        numbers = {names: number for number, names in enumerate(tables)}
        self._kinds = _column([numbers[tuple(report.values)] for report in reports])
        self._ranks = _column([report.rank for report in reports])
        self._steps = _column([report.step for report in reports])
        self._tables = [
            (names, [_column([row.values[name] for row in rows]) for name in names]) for names, rows in tables.items()
        ]
        self.last = reports[-1] if reports else None  # a sweep's table needs it often

    def read(self) -> list[Reported]:
        rows = [zip(*columns, strict=True) for _, columns in self._tables]
        return [
            Reported(rank, step, dict(zip(self._tables[kind][0], next(rows[kind], ()), strict=True)))
            for kind, rank, step in zip(self._kinds, self._ranks, self._steps, strict=True)
        ]


def _column(values: Sequence[Any]) -> Sequence[Any]:
    """Return the same values; in few bytes if they are all numbers of one kind."""
    types = {type(value) for value in values}
    for code in "d" if types <= {float} else "BHq" if types <= {int} else "":
        with contextlib.suppress(OverflowError):
            return array(code, values)
    return values


class ReportLog:
    """The reports of one launch, of all its attempts. For any thread."""

    def __init__(self) -> None:
        self._lock = renewed(threading.RLock())
        # With the rank, and not parsed: most are never read.
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._over: _Columns | None = None  # in place of it, once nothing more comes
        self._not_passed_on: list[Reported] = []
        self._callbacks: list[Callable[[Reported], object]] = []
        self._board: Board | None = None
        self._first_rank = 0
        self._seen: list[int] = []  # how many of each rank

    def attach(self, board: Board | None, spec: LaunchSpec, before: Sequence[int] = ()) -> None:
        """Read from a board from now on. ``before``: how much each rank had reported there before this launch."""
        with self._lock:
            if board is not self._board:
                self._board, self._first_rank = board, spec.rank_start
                self._seen = [*before] or [0] * spec.local_world_size

    def detach(self) -> None:
        """Read what is left, and no more: the memory is about to go."""
        with self._lock:
            self._read_board()
            self._board = None

    def finish(self) -> None:
        """Drop callbacks and pack the reports: nothing more comes."""
        with self._lock:
            self._callbacks, self._not_passed_on, self._seen = [], [], []
            self._over = self._over or _Columns(list(self._parsed()))
            self._kept.clear()

    def tell(self, callback: Callable[[Reported], object]) -> None:
        """Call back for each later report."""
        with self._lock:
            self._read_board()
            self._callbacks.append(callback)

    def period(self, timeout: float | None) -> float | None:
        """Return the seconds until the next read; ``timeout``: until something else is due. None: never."""
        if not self._callbacks:
            return timeout
        return _PERIOD if timeout is None else min(timeout, _PERIOD)

    def pass_on(self) -> None:
        """Read, and call back. What a callback raises is logged."""
        with self._lock:
            self._read_board()
            found, self._not_passed_on = self._not_passed_on, []
            callbacks = list(self._callbacks)
        for callback in callbacks:
            for report in found:
                _call(callback, report)

    def read(self) -> list[Reported]:
        """Return all reports, in the order in which they came."""
        with self._lock:
            self._read_board()
            return self._over.read() if self._over is not None else list(self._parsed())

    def latest(self) -> Reported | None:
        """Return the latest report."""
        with self._lock:
            self._read_board()
            if self._over is not None:
                return self._over.last
            return next((report for rank, data in reversed(self._kept) for report in _parsed(rank, [data])), None)

    def _parsed(self) -> Iterator[Reported]:
        return (report for rank, data in self._kept for report in _parsed(rank, [data]))

    def _read_board(self) -> None:
        for local_rank, seen in enumerate(self._seen if self._board is not None else ()):
            try:
                found, self._seen[local_rank] = self._board.ring(local_rank).read(seen)  # type: ignore[union-attr]
            except ValueError:  # ranks that stayed have ended, and their memory is gone
                return
            rank = self._first_rank + local_rank
            self._kept += ((rank, data) for data in found)
            if self._callbacks:
                self._not_passed_on += _parsed(rank, found)


def _parsed(rank: int, found: Iterable[bytes]) -> Iterator[Reported]:
    for data in found:
        with contextlib.suppress(ValueError, TypeError):  # user code can write to the board, too
            step, values = json.loads(data)
            yield Reported(rank, step, dict(values))


def _call(callback: Callable[[Reported], object], report: Reported) -> None:
    try:
        callback(report)
    except BaseException:  # also sys.exit: the run and its caller continue
        log.exception("a callback of a report raised")
