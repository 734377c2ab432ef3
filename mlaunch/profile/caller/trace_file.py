"""The file of ``profile=``: checked before ranks start, and made from their parts when they are gone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from mlaunch.base import own_files
from mlaunch.base.text import name_ranks
from mlaunch.caller import interrupts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.core.parts import CallerPart, Spell, Tell
from mlaunch.profile.caller import merged_trace
from mlaunch.profile.wire import ProfileOrder, TracePart
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended


class CallTrace(CallerPart):
    """The trace of a call's last attempt. OSError if its file cannot be written.

    ``spell``: how the options were given.
    """

    def __init__(self, options: Options, spell: Spell) -> None:
        path = os.path.abspath(os.fspath(cast("str", options.profile)))
        self._path, self._spell = path, spell
        self._named = spell("profile", path)
        ranks = None if options.profile_ranks is None else tuple(options.profile_ranks)
        first, last = options.profile_steps
        self.section: ProfileOrder = ProfileOrder(_directory_beside(path, self._named), first, last, ranks)
        self._begun = set[int]()  # ranks of other machines of which this attempt has pieces

    def close(self) -> None:
        own_files.remove_directory(self.section.directory)

    def planned(self, spec: LaunchSpec) -> None:
        """Raise ValueError if the option names ranks that the launch does not have."""
        self._begun.clear()
        ranks, order = spec.world_size, self.section
        if order.ranks is not None and max(order.ranks) >= ranks and not spec.nodes.guessed:
            wanted = self._spell("profile_ranks", order.ranks)
            raise ValueError(f"{wanted} with ranks 0 to {ranks - 1}: allowed: these")

    def heard(self, news: object) -> None:
        """Append a piece to the part of a rank on another machine, as long as there is room."""
        if not isinstance(news, TracePart):
            return
        path = f"{self.section.part_of(news.rank)}.gz"
        with contextlib.suppress(OSError):  # a part that is cut is reported later
            begun, flags = news.rank in self._begun, os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._begun.add(news.rank)
            with own_files.this_users_directory(os.path.dirname(path)) as there:
                fd = own_files.open_file(os.path.basename(path), flags | (0 if begun else os.O_TRUNC), dir_fd=there)
            with open(fd, "wb") as file:
                file.write(news.data)

    def settled(self, ended: Ended, tell: Tell) -> None:
        """Write the file, unless the call was interrupted. ``tell``: receives what is wrong with it."""
        if isinstance(ended.error, Exception | None):
            with interrupts.allowed():  # it may take long
                self._finish(ended.report(), tell)

    def _finish(self, report: LaunchReport, tell: Tell) -> None:
        order = self.section
        wanted = [rank.rank for rank in report.ranks if order.wants(rank.rank)]
        parts = {rank: path for rank in wanted if (path := order.written_by(rank))}
        if not parts:
            if any(order.has_begun(rank) for rank in wanted):
                tell(f"{self._named} is not written: it lacks {_why_missing(order, wanted)}")
            elif wanted:  # otherwise other machines have them
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

    def _write(self, report: LaunchReport, parts: Mapping[int, str], tell: Tell) -> None:
        path, first = self._path, report.ranks[0].rank
        if first > 0:  # other machines of the launch have files of their own, and may share the file system
            path = _from_rank(path, first)
        with own_files.this_users_directory(os.path.dirname(next(iter(parts.values())))) as fd:
            there = {rank: f"/proc/self/fd/{fd}/{os.path.basename(part)}" for rank, part in parts.items()}
            whole = f"/proc/self/fd/{fd}/whole"
            lacks = merged_trace.write(whole, report, there, compressed=path.endswith(".gz"))
            # Atomically: a reader never sees half of a file, and an earlier call's file stays until then.
            os.replace(whole, path)
        for rank, why in lacks.items():
            tell(f"{self._named} has a part only of rank {rank}'s trace: {why}")


def part(options: Options, spell: Spell) -> CallTrace:
    """Make the caller's part."""
    return CallTrace(options, spell)


def _directory_beside(path: str, named: str) -> str:
    """Make a directory for the parts. OSError if no file can be written at ``path``. ``named``: its name in errors."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "it is a directory")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "the file may not be written to")
        # Beside the file, not where temporary files are: that often is memory, and traces have hundreds of megabytes.
        return tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    except OSError as error:
        raise type(error)(error.errno, f"{named} cannot be written: {error.strerror}") from None


def _from_rank(path: str, first: int) -> str:
    """Return the file name for a machine that is not the first: trace-from-rank-2.json.gz."""
    stem, end = (path[:-3], path[-3:]) if path.endswith(".gz") else (path, "")
    stem, kind = os.path.splitext(stem)
    return f"{stem}-from-rank-{first}{kind}{end}"


def _why_missing(order: ProfileOrder, ranks: Sequence[int]) -> str:
    """Return why parts are missing: "rank 0, which did not come to step 5; rank 1, which had begun to ..."."""
    ended = [rank for rank in ranks if order.has_begun(rank)]
    early = [rank for rank in ranks if rank not in ended]
    told = [f"{name_ranks(early)}, which did not come to step {order.first}"] if early else []
    told += (
        [f"{name_ranks(ended)}, which had begun to record, and ended or failed before it was written"] if ended else []
    )
    return "; ".join(told)
