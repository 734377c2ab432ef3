"""Modules whose files have changed since a rank imported them, and their reload.

A rank that stays runs the code as it was when it was imported. Functions that are pickled by value are current.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.frames import is_ours
from mlaunch.rank import held_objects

# Ignored: thousands of files, which only change when something is installed.
_LIBRARIES = tuple({os.path.join(path, "") for path in sysconfig.get_paths().values()})


@dataclass
class _Modules:
    """The user's modules, as this rank imported them; libraries' are not among them."""

    known: set[str] = field(default_factory=set)  # all that were examined
    count: int = 0  # of all modules, when they were examined
    read: dict[str, int] = field(default_factory=dict)  # by file: its time of change in ns, as it was imported
    files: dict[str, tuple[str, int]] = field(default_factory=dict)  # by name: the file, and its time of change in ns
    before: dict[str, dict[str, Any]] = field(default_factory=dict)  # the contents, before a reload


_modules = _Modules()


def watch() -> None:
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


def begin() -> None:
    """Regard present modules as libraries, except what the fork server has imported for the user (``preload=``)."""
    _modules.known.update(sys.modules)
    if _modules.read:
        files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        _modules.known -= {name for name, file in files.items() if file in _modules.read}


def note() -> None:
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


def changed() -> list[str]:
    """Return the names of modules whose files are newer than what runs here, in the order of their import."""
    note()
    return [name for name, (file, at) in _modules.files.items() if _changed_at(file) > at and name in sys.modules]


def stamps() -> list[str]:
    """Return the changed modules as "name@time", with the time of the file's change: a second edit is news, too."""
    return [f"{name}@{_changed_at(_modules.files[name][0]):x}" for name in changed()]


def reload_changed() -> tuple[list[str], str]:
    """Reload the changed modules; return their names, and a traceback if one fails: ``put_back`` restores them all."""
    _modules.before.clear()
    # Finders cache directories by their time of change; a module that was just added would not be found.
    importlib.invalidate_caches()
    names = changed()
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


def put_back() -> None:
    """Give the modules of the latest reload the contents that they had before."""
    for name, contents in _modules.before.items():
        vars(sys.modules[name]).clear()
        vars(sys.modules[name]).update(contents)
        file, _ = _modules.files[name]
        _modules.files[name] = file, 0  # so that they still count as changed
    _modules.before.clear()


def finish() -> list[int]:
    """Finish a reload that went well on all ranks; return the numbers of held objects whose classes were replaced."""
    names = set(_modules.before)
    _modules.before.clear()
    # To isinstance() they are of no class that the module has now.
    return [number for number, found in held_objects.table.objects.items() if type(found).__module__ in names]
