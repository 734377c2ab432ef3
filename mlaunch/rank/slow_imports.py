"""Imports that the fork server has not done: how long they take, shown while they last, and summed up for the call.

Whichever module imports a package, its time is counted from its outermost module on. Modules of Python and torch are
the fork server's business (``late_imports``), and take their time once.
"""

from __future__ import annotations

import importlib.machinery
import sys
import sysconfig
import time
import types
from collections import defaultdict
from dataclasses import dataclass, field

from mlaunch.base.fds import in_forks
from mlaunch.protocol import late_imports
from mlaunch.protocol.board import Board

_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
# warm_up(preload=) would not help with these: the fork server has them, or imports them by itself.
_NOT_TOLD = sys.stdlib_module_names | {"torch", "mlaunch"}
_LONG = 0.5  # seconds of a call; less is not worth a line in the report


@dataclass
class _Watch:
    board: Board | None = None  # None: this process is no rank, or a fork of one, and notes nothing
    local_rank: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by package
    inside: bool = False  # a package is being imported

    def note(self, name: str) -> None:
        if self.board is not None:
            self.board.note_import(self.local_rank, name)


_watch = _Watch()


def prepare() -> None:
    """Make this process and its forks notice imports, once ``begin`` was called."""
    loader = importlib.machinery.SourceFileLoader
    original = loader.exec_module

    def exec_module(self: importlib.machinery.SourceFileLoader, module: types.ModuleType) -> None:
        if _watch.board is None:
            original(self, module)
            return
        # Before it is imported: a call that raises, ends or meets its deadline meanwhile teaches as much.
        late = late_imports.note_begun(module.__name__, self.path, leads=_watch.local_rank == 0)
        try:
            watched(self, module)
        finally:
            if late:
                late_imports.tell()

    def watched(self: importlib.machinery.SourceFileLoader, module: types.ModuleType) -> None:
        if _watch.inside or not self.path.startswith(_PACKAGES):
            original(self, module)
            return
        # What a package imports is part of its time, whichever package that is.
        begun, _watch.inside = time.monotonic(), True
        _watch.note(module.__name__)
        try:
            original(self, module)
        finally:
            _watch.inside = False
            _watch.note("")
            _watch.seconds[module.__name__.partition(".")[0]] += time.monotonic() - begun

    # Python removes the frames of imports from tracebacks, as long as no others are between them.
    for ours in (exec_module, watched):
        ours.__code__ = ours.__code__.replace(co_filename=original.__code__.co_filename)
    loader.exec_module = exec_module  # type: ignore[method-assign, assignment]


def begin(board: Board, local_rank: int) -> None:
    """Note imports of this process on the board from now on."""
    _watch.board, _watch.local_rank, _watch.inside = board, local_rank, False
    in_forks(_forget)


def conclude() -> None:
    """Note on the board which package took longest of those that a call had to import, if it took long."""
    if _watch.board is None or not _watch.seconds:
        return
    told = {name: seconds for name, seconds in _watch.seconds.items() if name not in _NOT_TOLD}
    # On ranks that stay, the next call must not report it again.
    _watch.seconds.clear()
    longest = max(told, key=told.__getitem__, default="")
    if told.get(longest, 0.0) >= _LONG:
        _watch.board.note_imported(_watch.local_rank, longest, told[longest])


def _forget() -> None:
    """Stop taking notes in a fork of the rank, which owns the row of the board."""
    _watch.board = None
