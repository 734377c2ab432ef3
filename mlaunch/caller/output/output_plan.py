"""The plan for the output of a call's ranks, from the options ``output``, ``log_dir`` and ``progress``."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from mlaunch.base.exceptions import misuse
from mlaunch.base.fds import renewed
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import ranges
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import LivePlace, live_place
from mlaunch.caller.report import notebook
from mlaunch.core import load
from mlaunch.protocol import launch_files
from mlaunch.protocol.spec import LaunchSpec

STREAMS = (1, 2)


@frozen_record
class Policy:
    """The treatment of one stream of one rank."""

    shown: bool = True
    kept: bool = False  # in a file


@frozen_record
class OutputPlan:
    """The plan for the output of a call on this machine.

    ``policies``: by (local rank, stream); streams without one do not pass through this process. ``prefix``: of the
    ranks that printed a line. ``merge``: show equal lines once. ``name``: the launch's, while others run; ``trial``:
    its name in its sweep, in place of a number. ``remember``: keep the end of each rank's output for the report.
    """

    policies: dict[tuple[int, int], Policy]
    prefix: Callable[[Sequence[int]], str]
    directory: str | None = None
    by_local_rank: bool = False  # True: directories of files are named after local ranks
    merge: bool = True
    area: LivePlace | None = None  # for changing lines
    name: str = ""
    trial: str = ""
    remember: bool = False
    sink: Callable[[int, bytes], None] | None = None  # takes what is shown, in place of this process's streams
    rich: Any = None  # of mlaunch/display: shows displays of ranks, which have a stream of their own; None: not shown

    @property
    def plain(self) -> bool:
        """True if it asks for neither files, nor lines that change, nor another place."""
        return self.directory is None and self.area is None and self.sink is None

    def like(self, other: OutputPlan) -> bool:
        """True if both are plain, and alike except for names."""
        ours = (self.policies, self.merge, self.remember)
        return self.plain and other.plain and ours == (other.policies, other.merge, other.remember)

    def carried(self, local_rank: int) -> tuple[int, ...]:
        """Return the streams of a rank that pass through this process."""
        return tuple(sorted(stream for rank, stream in self.policies if rank == local_rank))

    def piped(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the same for all ranks; () if there are none."""
        return tuple(map(self.carried, range(size))) if self.policies else ()


class LaunchNumber:
    """A number that no other running launch of this process has, from 1, until it is given back."""

    number: int
    _lock = renewed(threading.Lock())
    _running: ClassVar[weakref.WeakSet[LaunchNumber]] = weakref.WeakSet()

    def __init__(self) -> None:
        with self._lock:
            taken = {other.number for other in self._running}
            self.number = min({*range(1, len(taken) + 2)} - taken)
            self._running.add(self)

    def label(self, name: str = "") -> str:
        """Return a launch's name with its number while another launch is running; "" while this is the only one."""
        return f"{name}#{self.number} " if len(self._running) > 1 else ""

    def give_back(self) -> None:
        """Give the number back; may be called again."""
        with self._lock:
            self._running.discard(self)


def with_directory(options: Options, name: str) -> Options:
    """Return the options with a directory of this call's own in ``log_dir``, which its first file makes.

    Raises:
        OSError: It cannot be made.
    """
    if options.log_dir is None:
        return options
    try:
        return options.replaced({"log_dir": launch_files.own_directory(options.log_dir, name)})
    except OSError as error:
        raise misuse(OSError(error.errno, f"log_dir={options.log_dir!r}: {error.strerror}")) from None


def place_of(options: Options, *, blocks: bool = True) -> LivePlace | None:
    """Return the place for changing lines, if the options want any. ``blocks``: as in ``live_place``."""
    return live_place(blocks=blocks) if options.progress else None


def output_plan(options: Options, spec: LaunchSpec, place: LivePlace | None = None, trial: str = "") -> OutputPlan:
    """Make the plan; ``log_dir`` of the options is this call's own directory.

    ``place``: for changing lines, if there is one already. ``trial``: the call's name in its sweep.
    """
    output, policies = options.output, {}
    directory = None if options.log_dir is None else os.fspath(options.log_dir)
    for local_rank in range(spec.local_world_size if output != "raw" else 0):
        shown = output == "all" or (output == "rank0" and spec.rank(local_rank) == 0)
        for stream in STREAMS:
            policies[local_rank, stream] = Policy(shown=shown, kept=directory is not None)
    rich = None
    if policies and spec.rank_start == 0 and options.engine is None and notebook.is_here():
        rich = load.at_hand("display", "caller")
    if rich is not None:
        policies[0, rich.STREAM] = Policy(shown=policies[0, 1].shown)
    name = spec.call.name.rpartition(".")[2].removesuffix("()")
    bars = place or place_of(options)
    prefix, remember = _prefix(spec, trial), output != "raw"
    return OutputPlan(policies, prefix, directory, area=bars, name=name, trial=trial, remember=remember, rich=rich)


def _prefix(spec: LaunchSpec, trial: str) -> Callable[[Sequence[int]], str]:
    host = f"{os.uname().nodename}:" if spec.world_size > spec.local_world_size else ""
    before = f"{trial} " if trial else host
    return lambda ranks: f"[{before}{ranges(ranks, ',')}] "
