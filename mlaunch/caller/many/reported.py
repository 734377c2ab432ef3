"""What ranks of a submitted launch have reported (``mlaunch.report``), as their caller reads it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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


class ReportLog:
    """The reports of one launch, of all its attempts. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # As ranks wrote them, with the rank: a sweep keeps those of all its runs, and most are never read.
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
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
            kept = list(self._kept)
        return [report for rank, data in kept for report in _parsed(rank, [data])]

    def latest(self) -> Reported | None:
        """Returns the one that came last."""
        with self._lock:
            self._look()
            kept = reversed(self._kept)
            return next((report for rank, data in kept for report in _parsed(rank, [data])), None)

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
            yield Reported(rank, step, values)


def _call(callback: Callable[[Reported], object], report: Reported) -> None:
    try:
        callback(report)
    except Exception:
        log.exception("a callback of a report raised")
