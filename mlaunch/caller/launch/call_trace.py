"""The file of ``profile=``: looked for before ranks start, and made of their parts when they are gone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

from mlaunch.base.text import name_ranks
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report import merged_trace
from mlaunch.protocol.spec import ProfileOrder


class CallTrace:
    """Holds over the attempts of a call; the trace is that of the last one. Without ``profile=`` it does nothing.

    No context manager of contextlib's, which would set attributes of what passes through it. ``named``: how the path
    was given. OSError where no such file can be written.
    """

    def __init__(self, options: Options, named: str = "profile={!r}") -> None:
        self.order: ProfileOrder | None = None  # for the ranks
        if options.profile is not None:
            self._path = os.path.abspath(os.fspath(options.profile))
            self._named = named.format(self._path)
            ranks = None if options.profile_ranks is None else tuple(options.profile_ranks)
            first, last = options.profile_steps
            self.order = ProfileOrder(_directory_beside(self._path, self._named), first, last, ranks)

    def __enter__(self) -> CallTrace:
        return self

    def __exit__(self, *_: object) -> None:
        if self.order is not None:
            shutil.rmtree(self.order.directory, ignore_errors=True)

    def finish(self, ended: Ended, tell: Callable[[str], None]) -> None:
        """Writes the file, unless the call was interrupted; ``tell`` gets what is wrong with it."""
        if self.order is None or not isinstance(ended.error, Exception | None):
            return
        order, report = self.order, ended.report()
        parts = {rank.rank: path for rank in report.ranks if os.path.exists(path := order.part_of(rank.rank))}
        if not parts:
            tell(f"{self._named} is not written: no rank came to step {order.first} of {report.name}; steps "
                 f"are turns of mlaunch.progress, or calls of mlaunch.step()")  # fmt: skip
            return
        whole = os.path.join(order.directory, "whole")
        try:
            lacks = merged_trace.write(whole, report, parts, compressed=self._path.endswith(".gz"))
            os.replace(whole, self._path)
        except OSError as error:
            tell(f"{self._named} is not written: {error.strerror or error}")
            return
        missing = [rank.rank for rank in report.ranks if order.wants(rank.rank) and rank.rank not in parts]
        if missing:
            tell(f"{self._named} lacks {name_ranks(missing)}, which did not come to step {order.first}")
        for rank, why in lacks.items():
            tell(f"{self._named} has a part only of rank {rank}'s trace: {why}")


def _directory_beside(path: str, named: str) -> str:
    """Makes it; OSError if no file of that path can be written. ``named``: what it is called."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "it is a directory")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "the file may not be written to")
        return tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    except OSError as error:
        raise type(error)(error.errno, f"{named} cannot be written: {error.strerror}") from None
