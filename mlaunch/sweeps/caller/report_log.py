"""What ranks of a submitted launch have reported (``mlaunch.report``), as their caller reads it."""

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

_PERIOD = 0.1  # seconds between looks, where somebody is to be told
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
    """Say what was reported: "step 3, loss 0.25"; "" of nothing."""
    if reported is None:
        return ""
    values = [f"{name} {f'{one:.6g}' if isinstance(one, float) else one}" for name, one in reported.values.items()]
    return ", ".join([f"step {reported.step}", *values])


class _Columns:
    """Reports of a run that is over, in a tenth of the memory: a sweep keeps those of all its runs.

    Reports with the same names are rows of one table; ``kinds`` says of each in which it is.
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
        self.last = reports[-1] if reports else None  # which a sweep's table asks for again and again

    def read(self) -> list[Reported]:
        rows = [zip(*columns, strict=True) for _, columns in self._tables]
        return [
            Reported(rank, step, dict(zip(self._tables[kind][0], next(rows[kind], ()), strict=True)))
            for kind, rank, step in zip(self._kinds, self._ranks, self._steps, strict=True)
        ]


def _column(values: Sequence[Any]) -> Sequence[Any]:
    """Returns the same values, in as few bytes as they take where they are all numbers of one kind."""
    types = {type(value) for value in values}
    for code in "d" if types <= {float} else "BHq" if types <= {int} else "":
        with contextlib.suppress(OverflowError):
            return array(code, values)
    return values


class ReportLog:
    """The reports of one launch, of all its attempts. For any thread."""

    def __init__(self) -> None:
        self._lock = renewed(threading.RLock())
        # As ranks wrote them, with the rank: most are never read.
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._over: _Columns | None = None  # in its place, once nothing more comes
        self._untold: list[Reported] = []
        self._told: list[Callable[[Reported], object]] = []
        self._board: Board | None = None
        self._first_rank = 0
        self._seen: list[int] = []  # how many of each rank

    def attach(self, board: Board | None, spec: LaunchSpec, before: Sequence[int] = ()) -> None:
        """Reads from there from now on. ``before``: how much each rank has reported that is not this launch's."""
        with self._lock:
            if board is not self._board:
                self._board, self._first_rank = board, spec.rank_start
                self._seen = [*before] or [0] * spec.local_world_size

    def detach(self) -> None:
        """Reads what is left, and no more: the memory goes."""
        with self._lock:
            self._look()
            self._board = None

    def finish(self) -> None:
        """Drops callbacks: nothing more comes."""
        with self._lock:
            self._told, self._untold, self._seen = [], [], []
            self._over = self._over or _Columns(list(self._parsed()))
            self._kept.clear()

    def tell(self, callback: Callable[[Reported], object]) -> None:
        """Calls back for each report to come."""
        with self._lock:
            self._look()
            self._told.append(callback)

    def period(self, timeout: float | None) -> float | None:
        """Returns the seconds until the next look; ``timeout``: until something else is due. None: nothing is."""
        if not self._told:
            return timeout
        return _PERIOD if timeout is None else min(timeout, _PERIOD)

    def pass_on(self) -> None:
        """Looks, and tells. What a callback raises is logged."""
        with self._lock:
            self._look()
            found, self._untold = self._untold, []
            callbacks = list(self._told)
        for callback in callbacks:
            for report in found:
                _call(callback, report)

    def read(self) -> list[Reported]:
        """Returns what there is, in the order of its coming."""
        with self._lock:
            self._look()
            return self._over.read() if self._over is not None else list(self._parsed())

    def latest(self) -> Reported | None:
        """Returns the one that came last."""
        with self._lock:
            self._look()
            if self._over is not None:
                return self._over.last
            return next((report for rank, data in reversed(self._kept) for report in _parsed(rank, [data])), None)

    def _parsed(self) -> Iterator[Reported]:
        return (report for rank, data in self._kept for report in _parsed(rank, [data]))

    def _look(self) -> None:
        for local_rank, seen in enumerate(self._seen if self._board is not None else ()):
            try:
                found, self._seen[local_rank] = self._board.ring(local_rank).read(seen)  # type: ignore[union-attr]
            except ValueError:  # ranks that stayed have ended, and their memory is gone
                return
            rank = self._first_rank + local_rank
            self._kept += ((rank, data) for data in found)
            if self._told:
                self._untold += _parsed(rank, found)


def _parsed(rank: int, found: Iterable[bytes]) -> Iterator[Reported]:
    for data in found:
        with contextlib.suppress(ValueError, TypeError):  # user code can write there, too
            step, values = json.loads(data)
            yield Reported(rank, step, dict(values))


def _call(callback: Callable[[Reported], object], report: Reported) -> None:
    try:
        callback(report)
    except BaseException:  # sys.exit, too: the run goes on, and its caller
        log.exception("a callback of a report raised")
