"""Has features stand in for modules that only a notebook's own process can use.

The feature's ``rank.py`` has ``spec_of(name, path)``, of a module to be imported in its place (None: that itself), and
``change(module)``, for one that is there already.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mlaunch.features import FEATURES

_FEATURES = {module: feature.name for feature in FEATURES for module in feature.stands_in}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _FEATURES:
            return None
        rank = _rank_of(name)
        found: importlib.machinery.ModuleSpec | None = None if rank is None else rank.spec_of(name, path)
        return found


def install() -> None:
    """Affects imports that come later, and what a fork of the caller has imported already."""
    # First, so that a module is made here also where the one that it stands for would be found.
    sys.meta_path.insert(0, _Finder())
    for name in _FEATURES.keys() & sys.modules.keys():
        if (rank := _rank_of(name)) is not None:
            rank.change(sys.modules[name])


def _rank_of(module: str) -> Any:
    from mlaunch.core.load import at_hand  # which most ranks do not need

    return at_hand(_FEATURES[module], "rank")
