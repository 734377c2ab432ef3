"""The files that a zygote has imported: have they changed, and would a caller import others?"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlaunch.warm.wire import import_facts

_Stamp = tuple[int, int, int]
# Directories whose .pth files an interpreter reads as it starts. (Elsewhere .pth files are checkpoints.)
_SITES = {"site-packages", "dist-packages"}


class LoadedFiles:
    """The files of the modules that this process has imported, and the places where it looks for modules.

    ``missed``: modules that imports did not find, with the places; None: ``sys.path``.
    """

    def __init__(self, missed: Mapping[str, Sequence[str] | None] | None = None) -> None:
        missed = missed or {}
        self._base = list(sys.path)
        self._files = {name: file for name, file in _files() if os.path.isabs(file)}
        # Checked before each fork: 1,200 files take 4 ms.
        self._stamps = {file: _stamp(file) for file in self._files.values()}
        self._missed = {name.partition(".")[0] for name, path in missed.items() if path is None}
        self._tops = {name.partition(".")[0] for name in sys.modules} - set(sys.builtin_module_names)
        wanted = {directory: self._tops | self._missed for directory in self._base if os.path.isabs(directory)}
        for name, path in missed.items():
            for directory in path or ():
                wanted[directory] = wanted.get(directory, set()) | {name.rpartition(".")[2]}
        self._places = [_SearchedPlace(directory, names, self._tops) for directory, names in wanted.items()]

    def changed(self) -> str:
        """Return the first change of a file, or of a place where modules are looked for; "": there is none."""
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                return f"{file} has changed since it was imported"
        return next(filter(None, (place.changed() for place in self._places)), "")

    def why_others(self, path: Sequence[str]) -> str:
        """Return why a process with this ``sys.path`` might import other files for our modules; "": it would not.

        Its own entries, such as the directory of its script, may have modules of any other name.
        """
        more, lacking = import_facts.foreign_entries(path, self._base)
        if lacking:
            return f"its sys.path lacks {lacking[0]}, or has it in another order"
        return next(filter(None, (self._why_not_beside(os.path.abspath(entry)) for entry in more)), "")

    def _why_not_beside(self, directory: str) -> str:
        # A zip may hold any module, and listing it costs more than the fork.
        if os.path.isfile(directory):
            return f"its sys.path has the archive {directory}"
        found = _listed(directory)
        for name in sorted(self._tops & found):
            if os.path.dirname(self._files.get(name, "")) not in {directory, os.path.join(directory, name)}:
                return f"{os.path.join(directory, name)} would be imported in place of the library {name}"
        if names := sorted(self._missed & found):
            return f"{os.path.join(directory, names[0])} would be found, which was looked for in vain"
        if files := _pth_files(directory):
            return f"{min(files)} may have changed its interpreter, which has read it"
        return ""


@dataclass
class _SearchedPlace:
    """A directory in which modules are looked for, and those of its contents that decide what is imported.

    ``names``: of modules that were found, or missed; ``tops``: of packages that may use entry points.
    """

    directory: str
    names: set[str]
    tops: set[str]
    _known: dict[str, bool] = field(default_factory=dict)  # by distribution: True if its entry points count

    def __post_init__(self) -> None:
        self._stamp, self._found = _stamp(self.directory), self._look()
        self._pth = _pth_files(self.directory)

    def changed(self) -> str:
        """Return what has come, gone or changed here, and counts; "": nothing."""
        stamp = _stamp(self.directory)
        # Writing to a file does not change its directory's time.
        files = _pth_files(self.directory) if stamp != self._stamp else {file: _stamp(file) for file in self._pth}
        if files != self._pth:
            file = min(file for file in files.keys() | self._pth.keys() if files.get(file) != self._pth.get(file))
            return f"{file} has changed since it began, which Python reads as it starts"
        if stamp != self._stamp:
            found = self._look()
            if found != self._found:
                name = min(name for name, _ in found.items() ^ self._found.items())
                return f"{os.path.join(self.directory, name)} is not what it was when torch was imported"
            self._stamp = stamp
        return ""

    def _look(self) -> dict[str, _Stamp | None]:
        entries = _entries(self.directory)
        found: dict[str, _Stamp | None] = dict.fromkeys(name for name in entries if self._is_plugin(name))
        for name in _listed(self.directory) & set(self.names):
            path = os.path.join(self.directory, name)
            # A module that was found, but could not be imported, may have changed. Of others the files are checked.
            found[name] = None if name in sys.modules else _stamp(path) or _stamp(f"{path}.py")
        return found

    def _is_plugin(self, name: str) -> bool:
        """True if it is a distribution with entry points for what is imported, by the usual names."""
        if not name.endswith((".dist-info", ".egg-info")):
            return False
        if name not in self._known:
            text = ""
            with (
                contextlib.suppress(OSError),
                open(
                    os.path.join(self.directory, name, "entry_points.txt"), encoding="utf-8", errors="replace"
                ) as file,
            ):
                text = file.read()
            groups = re.findall(r"^\s*\[\s*([^]._\-\s]+)", text, re.MULTILINE)  # torch.backends, torch_dynamo_backends
            self._known[name] = not self.tops.isdisjoint(groups)
        return self._known[name]


def _files() -> list[tuple[str, str]]:
    found = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [(name, file) for name, file in found if isinstance(file, str)]


def _stamp(file: str) -> _Stamp | None:
    with contextlib.suppress(OSError):
        status = os.stat(file)
        # The inode, too: installers replace a file by a new one, often with an older time.
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None


def _entries(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(directory)
    return []


def _pth_files(directory: str) -> dict[str, _Stamp | None]:
    if os.path.basename(directory) not in _SITES:
        return {}
    files = [os.path.join(directory, name) for name in _entries(directory) if name.endswith(".pth")]
    return {file: _stamp(file) for file in files}


def _listed(directory: str) -> set[str]:
    """Return names that can be imported from a directory, without namespace packages, which come last."""
    found = set()
    for name in _entries(directory):
        stem, _, suffix = name.partition(".")
        if suffix.endswith(("py", "pyc", "so")) or (not suffix and _is_package(os.path.join(directory, name))):
            found.add(stem)
    return found


def _is_package(directory: str) -> bool:
    return any(os.path.exists(os.path.join(directory, f"__init__{suffix}")) for suffix in (".py", ".pyc", ".so"))
