"""What a launch's report holds: its ranks, their phases, and the table of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import in_bytes, in_seconds

if TYPE_CHECKING:
    from mlaunch.slow.wire import SlowRanks

PHASES = ("import", "start", "rendezvous", "receive", "run", "send", "wait", "stop")


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
        pid: Its process.
        device: "cpu", "cuda:1".
        spans: Its phases, in order; those that it did not come to are missing.
        peak_memory: The most physical memory that it held, in bytes; 0 while it lives, when it is not known.
        returned: The size of its pickled value in bytes; None without one.
        end: "returned", or as in ``RankFailure.what``.
        host: Where an engine has placed it; "" on this machine.
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
        """Tells how long a phase took; None if the rank did not come to it."""
        found = [span.end - span.start for span in self.spans if span.phase == phase]
        return sum(found) if found else None


@frozen_record
class Stopped:
    """The ranks were asked to stop, and have agreed where.

    Attributes:
        reason: What ``mlaunch.stopping()`` returned: "TERM", "asked".
        asked: When that was, in seconds of the epoch.
        step: At which call of ``mlaunch.stopping()`` all ranks stopped, from 1.
    """

    reason: str
    asked: float
    step: int

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.asked))
        return f"stopped at step {self.step}, as asked at {at} ({self.reason})"


@frozen_record
class LaunchRecord:
    """What is known of a launch; see ``LaunchReport``."""

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

    @property
    def title(self) -> str:
        """The report in one line."""
        size = len(self.ranks)
        ranks = f"{size} rank{'s' * (size != 1)}" + (f" of {self.world_size}" if self.world_size != size else "")
        again = f", restart {self.restart_count}" if self.restart_count else ""
        return f"{self.name}  {ranks} on {self.host}, {self.seconds:.3g} s{again}"

    def rows(self) -> list[Sequence[str]]:
        """Returns the table: a head, then a row for each rank."""
        phases = [phase for phase in PHASES if any(rank.seconds(phase) is not None for rank in self.ranks)]
        hosts = len({rank.host for rank in self.ranks}) > 1
        placed = any(rank.place for rank in self.ranks)
        where = [*(["host"] if hosts else []), "pid", "device", *(["place"] if placed else [])]
        head = ["rank", *where, *phases, "peak memory", "value", "end"]
        return [head, *(_cells(rank, phases, hosts=hosts, placed=placed) for rank in self.ranks)]


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
