"""The file of ``profile=``: looked for before ranks start, and made of their parts when they are gone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence

from mlaunch.base import own_files
from mlaunch.base.text import name_ranks
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report import merged_trace
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.protocol.spec import ProfileOrder


class CallTrace:
    """Holds over the attempts of a call; the trace is that of the last one. Without ``profile=`` it does nothing.

    Not a contextlib context manager, which would set attributes of what passes through it. ``named``: how the path
    was given. OSError where no such file can be written.
    """

    def __init__(self, options: Options, named: str = "profile={!r}") -> None:
        self.order: ProfileOrder | None = None  # for the ranks
        if options.profile is not None:
            self._path = os.path.abspath(os.fspath(options.profile))
            self._named, self._shows = named.format(self._path), options.progress
            ranks = None if options.profile_ranks is None else tuple(options.profile_ranks)
            first, last = options.profile_steps
            self.order = ProfileOrder(_directory_beside(self._path, self._named), first, last, ranks)

    def __enter__(self) -> CallTrace:
        return self

    def __exit__(self, *_: object) -> None:
        if self.order is not None:
            own_files.remove_directory(self.order.directory)

    def finish(self, ended: Ended, tell: Callable[[str], None]) -> None:
        """Writes the file, unless the call was interrupted; ``tell`` gets what is wrong with it."""
        if self.order is None or not isinstance(ended.error, Exception | None):
            return
        order, report = self.order, ended.report()
        wanted = [rank.rank for rank in report.ranks if order.wants(rank.rank)]
        parts = {rank: path for rank in wanted if (path := order.written_by(rank))}
        if not parts:
            if any(order.has_begun(rank) for rank in wanted):
                tell(f"{self._named} is not written: it lacks {_why_missing(order, wanted)}")
            elif wanted:  # else other machines have them
                tell(f"{self._named} is not written: no rank came to step {order.first} of {report.name}; steps are "
                     f"turns of mlaunch.progress, or calls of mlaunch.step()")  # fmt: skip
            return
        try:
            self._write(report, parts, tell)
        except OSError as error:
            tell(f"{self._named} is not written: {error.strerror or error}")
            return
        if missing := [rank for rank in wanted if rank not in parts]:
            tell(f"{self._named} lacks {_why_missing(order, missing)}")

    def _write(self, report: LaunchReport, parts: Mapping[int, str], tell: Callable[[str], None]) -> None:
        path, first = self._path, report.ranks[0].rank
        if first > 0:  # other machines of the launch have files of their own, and may share the file system
            path = _from_rank(path, first)
        with own_files.this_users_directory(os.path.dirname(next(iter(parts.values())))) as fd:
            there = {rank: f"/proc/self/fd/{fd}/{os.path.basename(part)}" for rank, part in parts.items()}
            whole = f"/proc/self/fd/{fd}/whole"
            lacks = merged_trace.write(whole, report, there, compressed=path.endswith(".gz"))
            # As a whole: a reader never sees half of it, and the one of an earlier call stays until then.
            os.replace(whole, path)
        for rank, why in lacks.items():
            tell(f"{self._named} has a part only of rank {rank}'s trace: {why}")


class PartsOfMachines:
    """The parts of ranks on other machines, which come in pieces, as long as there is room. ``order`` None: no."""

    def __init__(self, order: ProfileOrder | None) -> None:
        self._order = order
        self._begun = set[int]()  # ranks of which this attempt has some

    def add(self, rank: int, data: bytes) -> None:
        """Adds a piece to a rank's part."""
        if self._order is None:
            return
        path = f"{self._order.part_of(rank)}.gz"
        with contextlib.suppress(OSError):  # a part that is cut is told of
            begun, flags = rank in self._begun, os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._begun.add(rank)
            with own_files.this_users_directory(os.path.dirname(path)) as there:
                fd = own_files.open_file(os.path.basename(path), flags | (0 if begun else os.O_TRUNC), dir_fd=there)
            with open(fd, "wb") as file:
                file.write(data)


def _directory_beside(path: str, named: str) -> str:
    """Makes the directory; OSError if no file of that path can be written. ``named``: what the path is called."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "it is a directory")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "the file may not be written to")
        # Beside the file, not where temporary files are: that mostly is memory, and traces have hundreds of
        # megabytes.
        return tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    except OSError as error:
        raise type(error)(error.errno, f"{named} cannot be written: {error.strerror}") from None


def _from_rank(path: str, first: int) -> str:
    """Returns the name of the file of a machine that is not the first: trace-from-rank-2.json.gz."""
    stem, end = (path[:-3], path[-3:]) if path.endswith(".gz") else (path, "")
    stem, kind = os.path.splitext(stem)
    return f"{stem}-from-rank-{first}{kind}{end}"


def _why_missing(order: ProfileOrder, ranks: Sequence[int]) -> str:
    """Says "rank 0, which did not come to step 5; rank 1, which had begun to record, and ..."."""
    ended = [rank for rank in ranks if order.has_begun(rank)]
    early = [rank for rank in ranks if rank not in ended]
    told = [f"{name_ranks(early)}, which did not come to step {order.first}"] if early else []
    told += (
        [f"{name_ranks(ended)}, which had begun to record, and ended or failed before it was written"] if ended else []
    )
    return "; ".join(told)
