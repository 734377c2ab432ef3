"""The imports of a zygote: what they depended on, and whether their files are still the same.

Forks inherit the results. So a record says which modules were missing, which variables were read, and who drew random
numbers; and the files say whether a caller would import others.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mlaunch.warm.wire import import_facts

_Path = tuple[str, ...] | None  # where a part of a package is looked for; None: on sys.path
_MAPPINGS = {"os", "_collections_abc", "collections.abc"}  # the code of os.environ
_SOURCES = {"os", "random", "secrets", "uuid"}
_IMPORTERS = "importlib."
_DRAWN_AFRESH = ("numpy.random", "multiprocessing")  # each fork draws again
_AT_START = ("sitecustomize", "usercustomize")  # every interpreter looks for these
_Stamp = tuple[int, int, int]
# Directories whose .pth files an interpreter reads as it starts. (Elsewhere .pth files are checkpoints.)
_SITES = {"site-packages", "dist-packages"}


@dataclass
class ImportRecord:
    """Effects of the imports of this process.

    Attributes:
        read: Variables that were read, each with its values at those times; None: not set.
        drawn: Modules that have drawn random numbers, with the functions that they have called.
        finders: Additions to ``sys.meta_path`` and ``sys.path_hooks``.
    """

    read: dict[str, set[str | None]] = field(default_factory=dict)
    drawn: dict[str, str] = field(default_factory=dict)
    finders: list[str] = field(default_factory=list)
    _tried: dict[str, _Path] = field(default_factory=dict)
    _copying: set[tuple[object, int]] = field(default_factory=set)  # lines that iterate over all variables

    @property
    def missed(self) -> dict[str, _Path]:
        """The modules that were looked for and not found, with the places."""
        tried: dict[str, _Path] = dict.fromkeys(_AT_START) | self._tried
        return {name: path for name, path in tried.items() if name not in sys.modules}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Note which modules and variables the imports inside look for, and which finders they add."""
        finder, before = _Notes(self._tried), dict(os.environ)
        known = [*sys.meta_path, *sys.path_hooks]
        sys.meta_path.insert(0, finder)
        try:
            with (
                _watched(type(os.environ), "__iter__", self._note_all),
                _watched(type(os.environ), "__getitem__", self._note(before)),
            ):
                yield
        finally:
            sys.meta_path.remove(finder)
            added = [one for one in [*sys.meta_path, *sys.path_hooks] if one not in known]
            self.finders += [f"{_type_of(one).__module__}.{_type_of(one).__qualname__}" for one in added]

    def _note(self, before: dict[str, str]) -> Callable[[Any, Any], None]:
        def note(_environ: Any, key: Any) -> None:
            if isinstance(key, str | bytes) and _line_of(sys._getframe(2)) not in self._copying:
                name = os.fsdecode(key)
                self.read.setdefault(name, set()).add(before.get(name))

        return note

    def _note_all(self, _environ: Any) -> None:
        # Code that copies the environment, or searches it for a prefix, depends on no variable by name.
        self._copying.add(_line_of(sys._getframe(2)))

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Note random numbers that the imports inside draw, and that would differ between processes."""

        def note(*_: Any, **__: Any) -> None:
            by, called = _importer(sys._getframe(1))
            if not by.startswith(_DRAWN_AFRESH):
                self.drawn.setdefault(by, called)

        def note_seed(generator: Any, seed: Any = None, *_: Any, **__: Any) -> None:
            if seed is None and not isinstance(generator, random.SystemRandom):
                note()

        urandom = os.urandom
        with (
            _watched(os, "urandom", note),
            _watched(random, "_urandom", note),
            _watched(random.Random, "seed", note_seed),
        ):
            ours = os.urandom
            yield
        for module in list(sys.modules.values()):  # imported by name: restore the original
            for name in [name for name, value in list(vars(module).items()) if value is ours]:
                setattr(module, name, urandom)

    def notes(self) -> tuple[str, ...]:
        """Return notes for people about the preloaded modules."""
        drawn = [
            f"{module} has drawn random numbers as it was imported ({called}): all ranks of all commands have the same"
            for module, called in self.drawn.items()
        ]
        found = [f"{finder} looks for modules in all commands, since a module of the warm fork server has added it"
                 for finder in self.finders]  # fmt: skip
        return (*drawn, *found)

    def why_others(self, variables: bytes) -> str:
        """Return the variable that imports have read, and that differs for a caller; "": none.

        ``variables``: the caller's, as ``import_facts.hashed`` returns them.
        """
        theirs = import_facts.Hashes(variables)
        for name, values in sorted(self.read.items()):
            if not all(theirs.has(name, value) for value in values):
                # Not its value: it may be a secret of the shell that a preloaded module has read.
                was = "not set" if values == {None} else "set to something else"
                return f"variable {name} was {was} when a module of the warm fork server read it"
        return ""


class _Notes:
    """A finder that finds nothing, and notes the modules that are looked for."""

    def __init__(self, tried: dict[str, _Path]) -> None:
        self._tried = tried

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> None:
        self._tried[name] = None if path is None else tuple(path)


@contextlib.contextmanager
def _watched(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    real = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        note(*args, **options)
        return real(*args, **options)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, real)


def _importer(frame: FrameType | None) -> tuple[str, str]:
    """Return the module that has asked for random numbers, and the function that it has called for them."""
    called = "os.urandom"
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module in _SOURCES:
            name = frame.f_code.co_name
            called = f"{module}.{name if name != '__init__' else type(frame.f_locals.get('self')).__name__}"
        elif module != __name__ and not module.startswith(_IMPORTERS):
            return module, called
        frame = frame.f_back
    return "?", called


def _line_of(frame: FrameType) -> tuple[object, int]:
    """Return the line that uses the environment, above those of the classes of ``os.environ``."""
    while frame.f_back is not None and frame.f_globals.get("__name__") in _MAPPINGS:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _type_of(finder: object) -> type:
    return finder if isinstance(finder, type) else type(finder)


# Files


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
            return f"{os.path.join(directory, names[0])} would be found, which the warm fork server did not find"
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
            return f"{file}, which Python reads as it starts, has changed since the warm fork server began"
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
