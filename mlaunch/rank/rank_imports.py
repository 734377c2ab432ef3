"""The imports of a rank: how long they take, and which files have changed since; the reload of those.

*Time.* Imports that the fork server has not done are shown while they last, and summed up for the call. Whichever
module imports a package, its time is counted from its outermost module on. Modules of Python and torch are the fork
server's business (``late_imports``), and take their time once.

*Reload.* A rank that stays runs the code as it was when it was imported. Functions that are pickled by value are
current.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import sysconfig
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.fds import in_forks
from mlaunch.base.frames import is_ours
from mlaunch.protocol import late_imports
from mlaunch.protocol.board import Board

_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
# warm_up(preload=) would not help with these: the fork server has them, or imports them by itself.
_NOT_TOLD = sys.stdlib_module_names | {"torch", "mlaunch"}
_LONG = 0.5  # seconds of a call; less is not worth a line in the report
# Ignored by a reload: thousands of files, which only change when something is installed.
_LIBRARIES = tuple({os.path.join(path, "") for path in sysconfig.get_paths().values()})


@dataclass
class _Timing:
    """The time that imports of this process have taken."""

    board: Board | None = None  # None: this process is no rank, or a fork of one, and notes nothing
    local_rank: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by package
    inside: bool = False  # a package is being imported

    def note(self, name: str) -> None:
        if self.board is not None:
            self.board.note_import(self.local_rank, name)


_timing = _Timing()


def time_imports() -> None:
    """Make this process and its forks notice imports, once ``begin_timing`` was called."""
    loader = importlib.machinery.SourceFileLoader
    original = loader.exec_module

    def exec_module(self: importlib.machinery.SourceFileLoader, module: types.ModuleType) -> None:
        if _timing.board is None:
            original(self, module)
            return
        # Noted before the import: the call may raise, end or meet its deadline meanwhile.
        late = late_imports.note_begun(module.__name__, self.path, leads=_timing.local_rank == 0)
        try:
            watched(self, module)
        finally:
            if late:
                late_imports.tell()

    def watched(self: importlib.machinery.SourceFileLoader, module: types.ModuleType) -> None:
        if _timing.inside or not self.path.startswith(_PACKAGES):
            original(self, module)
            return
        # What a package imports is part of its time, whichever package that is.
        begun, _timing.inside = time.monotonic(), True
        _timing.note(module.__name__)
        try:
            original(self, module)
        finally:
            _timing.inside = False
            _timing.note("")
            _timing.seconds[module.__name__.partition(".")[0]] += time.monotonic() - begun

    # Python removes the frames of imports from tracebacks, as long as no others are between them.
    for ours in (exec_module, watched):
        ours.__code__ = ours.__code__.replace(co_filename=original.__code__.co_filename)
    loader.exec_module = exec_module  # type: ignore[method-assign, assignment]


def begin_timing(board: Board, local_rank: int) -> None:
    """Note imports of this process on the board from now on."""
    _timing.board, _timing.local_rank, _timing.inside = board, local_rank, False
    in_forks(_stop_timing)


def note_slowest() -> None:
    """Note on the board which package took longest of those that a call had to import, if it took long."""
    if _timing.board is None or not _timing.seconds:
        return
    told = {name: seconds for name, seconds in _timing.seconds.items() if name not in _NOT_TOLD}
    # On ranks that stay, the next call must not report it again.
    _timing.seconds.clear()
    longest = max(told, key=told.__getitem__, default="")
    if told.get(longest, 0.0) >= _LONG:
        _timing.board.note_imported(_timing.local_rank, longest, told[longest])


def _stop_timing() -> None:
    """Stop noting imports in a fork of the rank: the row of the board is the rank's."""
    _timing.board = None


# Changed files, and reload


@dataclass
class _Modules:
    """The user's modules, as this rank imported them; libraries' are not among them."""

    known: set[str] = field(default_factory=set)  # all that were examined
    count: int = 0  # of all modules, when they were examined
    read: dict[str, int] = field(default_factory=dict)  # by file: its time of change in ns, as it was imported
    files: dict[str, tuple[str, int]] = field(default_factory=dict)  # by name: the file, and its time of change in ns
    before: dict[str, dict[str, Any]] = field(default_factory=dict)  # the contents, before a reload


_modules = _Modules()


def watch_files() -> None:
    """Note the times of change of files that are imported from now on, in this process and its forks.

    Afterwards it would be too late: a call may take hours, and its files may be edited meanwhile.
    """
    loader = importlib.machinery.SourceFileLoader
    original = loader.path_stats

    def path_stats(self: importlib.machinery.SourceFileLoader, path: str) -> Mapping[str, Any]:
        if _is_of_the_user(path):
            _modules.read[path] = _changed_at(path)
        return original(self, path)

    # The loader asks for the time just before it reads the file; later, an edit in between would be missed.
    loader.path_stats = path_stats  # type: ignore[method-assign]


def begin_watch() -> None:
    """Treat present modules as libraries, except those that the fork server imported for the user (``preload=``)."""
    _modules.known.update(sys.modules)
    if _modules.read:
        files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        _modules.known -= {name for name, file in files.items() if file in _modules.read}


def note_new() -> None:
    """Note the modules that have been imported since the last time."""
    if len(sys.modules) == _modules.count:  # thousands, at each call
        return
    _modules.count = len(sys.modules)
    for name in [name for name in sys.modules if name not in _modules.known]:
        _modules.known.add(name)
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and _is_of_the_user(file):
            _modules.files[name] = file, _modules.read.get(file, _changed_at(file))


def _is_of_the_user(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and not is_ours(file)


def _changed_at(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def changed_modules() -> list[str]:
    """Return the names of modules whose files are newer than what runs here, in the order of their import."""
    note_new()
    return [name for name, (file, at) in _modules.files.items() if _changed_at(file) > at and name in sys.modules]


def stamps() -> list[str]:
    """Return the changed modules as "name@time", with the time of the file's change: a second edit is news, too."""
    return [f"{name}@{_changed_at(_modules.files[name][0]):x}" for name in changed_modules()]


def reload_changed() -> tuple[list[str], str]:
    """Reload the changed modules; return their names, and a traceback if one fails: then call ``undo_reload``."""
    _modules.before.clear()
    # Finders cache directories by their time of change; a module that was just added would not be found.
    importlib.invalidate_caches()
    names = changed_modules()
    try:
        for name in names:
            module = sys.modules[name]
            # A reload runs in the old namespace: a module that fails half-way has new names and old ones.
            _modules.before[name] = dict(vars(module))
            _reload(module)
    except BaseException:
        return names, traceback.format_exc()
    return names, ""


def _reload(module: types.ModuleType) -> None:
    file, _ = _modules.files[module.__name__]
    at = _changed_at(file)  # before the reload: an edit during it is one more change
    importlib.reload(module)
    _modules.files[module.__name__] = file, at


def undo_reload() -> None:
    """Give the modules of the latest reload the contents that they had before."""
    for name, contents in _modules.before.items():
        vars(sys.modules[name]).clear()
        vars(sys.modules[name]).update(contents)
        file, _ = _modules.files[name]
        _modules.files[name] = file, 0  # so that they still count as changed
    _modules.before.clear()


def finish_reload() -> set[str]:
    """Finish a reload that went well on all ranks; return the names of the modules."""
    names = set(_modules.before)
    _modules.before.clear()
    return names
