"""Modules that a rank cannot import though they are in ``sys.modules`` here, so their definitions go by value.

They were loaded from a file's path, or their directory has left ``sys.path`` since, or another module of that name is
found first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import NamedTuple


class _Answer(NamedTuple):
    module: types.ModuleType | None
    importable: bool


_answers: dict[str, _Answer] = {}
_search_path: list[str] = []  # the search path for which the answers hold


def is_importable(name: str) -> bool:
    """True if importing this name finds the module that is loaded, or if that cannot be decided."""
    if _search_path != sys.path:
        _answers.clear()
        _search_path[:] = sys.path
    module = sys.modules.get(name)
    answer = _answers.get(name)
    if answer is None or answer.module is not module:
        # Checked once for each module: it takes 9 to 30 us, and may be asked for every object of a value.
        answer = _answers[name] = _Answer(module, _ask(name, getattr(module, "__spec__", None)))
    return answer.importable


def _ask(name: str, spec: ModuleSpec | None) -> bool:
    # Whether other loaders would find the module again is unknown. Then it goes by name, as pickle sends it anyway.
    if spec is None or type(spec.loader) is not SourceFileLoader:
        return True
    parent = name.rpartition(".")[0]
    if not parent:
        return _is_found(name, None, spec)
    path = getattr(sys.modules.get(parent), "__path__", None)
    return path is not None and is_importable(parent) and _is_found(name, list(path), spec)


def _is_found(name: str, path: list[str] | None, spec: ModuleSpec) -> bool:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a user's finder; a file that is gone
            found = finder.find_spec(name, path)
            if found is not None:
                return found.origin == spec.origin or os.path.samefile(found.origin or "", spec.origin or "")
    return False
