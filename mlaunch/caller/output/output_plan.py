"""What becomes of the output of a call's ranks."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.output.display import Area
from mlaunch.protocol import rich_output

STREAMS = (1, 2)


@frozen_record
class Policy:
    """What becomes of one stream of one rank."""

    shown: bool = True
    kept: bool = False  # in a file


@frozen_record
class OutputPlan:
    """What becomes of the output of a call on this machine.

    ``policies``: by (local rank, stream); a stream that has none is the rank's own, not ours to carry. Of what a rank
    displays (``rich_output.STREAM``) only the caller's own notebook is shown something. ``prefix``: of
    the ranks that printed a line. ``merge``: equal lines are shown once. ``name``: of the launch, where others may run
    at the same time; ``trial``: what tells it apart in its sweep, instead of a number. ``remember``: the end of what
    each rank prints is kept for the report.
    """

    policies: dict[tuple[int, int], Policy]
    prefix: Callable[[Sequence[int]], str]
    directory: str | None = None
    by_local_rank: bool = False  # the directories of its files are named by
    merge: bool = True
    area: Area | None = None  # for lines that change
    name: str = ""
    trial: str = ""
    remember: bool = False
    sink: Callable[[int, bytes], None] | None = None  # takes what is shown of a stream, in place of this process's

    @property
    def plain(self) -> bool:
        """Whether it asks for neither files, nor lines that change, nor another place."""
        return self.directory is None and self.area is None and self.sink is None

    @property
    def rich(self) -> bool:
        """Whether what some rank displays is carried."""
        return any(stream == rich_output.STREAM for _, stream in self.policies)

    def like(self, other: OutputPlan) -> bool:
        """Tells whether both are plain, and ask for the same but for names."""
        ours = (self.policies, self.merge, self.remember)
        return self.plain and other.plain and ours == (other.policies, other.merge, other.remember)

    def carried(self, local_rank: int) -> tuple[int, ...]:
        """Returns the streams of a rank that are ours to carry."""
        streams = (*STREAMS, rich_output.STREAM)
        return tuple(stream for stream in streams if (local_rank, stream) in self.policies)

    def piped(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Returns the same for all ranks; () where nothing is carried."""
        return tuple(self.carried(local_rank) for local_rank in range(size)) if self.policies else ()


class LaunchNumber:
    """A number that no other running launch of this process has, from 1, until it is given back."""

    number: int
    _lock = threading.Lock()
    _running: ClassVar[weakref.WeakSet[LaunchNumber]] = weakref.WeakSet()

    def __init__(self) -> None:
        with self._lock:
            taken = {other.number for other in self._running}
            self.number = next(number for number in itertools.count(1) if number not in taken)
            self._running.add(self)

    def label(self, name: str = "") -> str:
        """Returns a launch's name with its number while another launch is running; "" while this is the only one."""
        return f"{name}#{self.number} " if len(self._running) > 1 else ""

    def give_back(self) -> None:
        """Gives the number back; may be called again."""
        with self._lock:
            self._running.discard(self)
