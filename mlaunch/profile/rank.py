"""A rank that torch's profiler records for some steps of one call."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from mlaunch.base.own_files import open_file, this_users_directory
from mlaunch.core.parts import RankPart
from mlaunch.profile.wire import ProfileOrder
from mlaunch.rank import for_users

if TYPE_CHECKING:
    from torch import profiler


class ProfiledRank(RankPart):
    """A rank of a launch with ``profile=``."""

    def __init__(self, order: ProfileOrder, rank: int) -> None:
        self._order, self._rank = order, rank

    def around_call(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that profiles this rank's steps, if the order names this rank."""
        wanted = self._order.wants(self._rank)
        return StepProfile(self._order, self._rank) if wanted else contextlib.nullcontext()


def part(section: ProfileOrder, rank: int) -> ProfiledRank:
    """Make a rank's part."""
    return ProfiledRank(section, rank)


class StepProfile:
    """The profile of a rank's steps, held while the function runs.

    A step ends with a turn of ``mlaunch.progress``, or with ``mlaunch.step()``. Once ``step`` was called, turns do not
    count. If the profiler fails, that is reported, and the run continues without it.
    """

    def __init__(self, order: ProfileOrder, rank: int) -> None:
        self._order, self._rank = order, rank
        self._turns_count = True
        self._profile: profiler.profile | None = None
        self._asked_to_end: Any = signal.SIG_DFL  # what the signal does otherwise
        self._ends_by: int | None = None  # that signal, once it has come
        self._acts = False  # the profiler does something, perhaps writes the file, which must be whole

    def __enter__(self) -> None:
        self._try(self._begin)
        self._asked_to_end = _signal.getsignal(signal.SIGTERM)
        # Another rank's failure ends this one with this signal.
        if self._profile is not None and self._asked_to_end == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._write_and_end)
        # Through its slot, since progress() is imported by users and must not import torch's profiler.
        for_users.count_steps(self)

    def __exit__(self, *_: object) -> None:
        for_users.count_steps(None)
        self._end()
        if _signal.getsignal(signal.SIGTERM) == self._write_and_end:
            signal.signal(signal.SIGTERM, self._asked_to_end)

    def _write_and_end(self, number: int, _frame: FrameType | None) -> None:
        """Write what was recorded, and then end as the signal does; once the profiler has done what it is doing."""
        self._ends_by = number
        if not self._acts:
            self._obey(number)

    def _obey(self, number: int) -> None:
        if self._profile is not None:
            self._end()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def turn(self) -> None:
        """Count a turn of a loop."""
        if self._turns_count:
            self._count()

    def step(self) -> None:
        """Count a step that the function has marked by ``mlaunch.step()``."""
        self._turns_count = False
        self._count()

    def _begin(self) -> None:
        from torch import profiler

        made: Any = profiler.profile(schedule=self._at, on_trace_ready=self._write)
        made.start()
        self._profile = made
        if self._order.first == 0:
            self._note_begin()

    def _count(self) -> None:
        running = self._profile
        if running is not None:
            self._try(running.step)
        if running is not None and running.step_num == self._order.first:
            self._try(self._note_begin)
        if running is not None and running.step_num > self._order.last:
            self._end()

    def _end(self) -> None:
        self._try(self._stop)

    def _stop(self) -> None:
        # Removed first: stop() writes the file, and a user's step may come here again meanwhile.
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def _at(self, step: int) -> profiler.ProfilerAction:
        """Return the profiler's action in a step: it warms up in the step before the first."""
        from torch.profiler import ProfilerAction

        first, last = self._order.first, self._order.last
        if first <= step < last:
            return ProfilerAction.RECORD_AND_SAVE if step == last - 1 else ProfilerAction.RECORD
        # CUPTI's start takes time, which would count as the first step's.
        return ProfilerAction.WARMUP if step == first - 1 else ProfilerAction.NONE

    def _note_begin(self) -> None:
        directory, name = os.path.split(self._order.begun_by(self._rank))
        with this_users_directory(directory) as fd:
            os.close(open_file(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))

    def _write(self, recorded: profiler.profile) -> None:
        directory, name = os.path.split(self._order.part_of(self._rank))
        # Not by its path: a user who may rename files beside the trace could have put another directory there.
        with this_users_directory(directory) as fd:
            recorded.export_chrome_trace(f"/proc/self/fd/{fd}/{name}")

    def _try(self, act: Callable[[], None]) -> None:
        within, self._acts = self._acts, True
        try:
            act()
        except Exception as error:  # torch's, CUPTI's, or of a full disk: the run must continue
            self._profile = None
            # No warning: a user's filter may turn it into an exception.
            what = f"{type(error).__name__}: {error}"
            print(f"mlaunch: rank {self._rank} is not profiled: {what}", file=sys.stderr, flush=True)
        finally:
            self._acts = within
        if self._ends_by is not None and not within:
            self._obey(self._ends_by)
