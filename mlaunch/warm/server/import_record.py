"""A record of imports: missing modules, variables read, random numbers drawn. Forks inherit these results."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
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
        found = [f"{finder} looks for modules in all commands, since a module that is kept has added it"
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
                return f"variable {name} was {was} when a module read it that is kept"
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
    """Return the module that has drawn, and the function that it has called."""
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
