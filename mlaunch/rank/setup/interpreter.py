"""The parts of the interpreter that a rank sets up for user code: ``__main__``, ``breakpoint()``, modules.

Features stand in for modules that only a notebook's own process can use. Such a feature's ``rank.py`` has
``spec_of(name, path)``, the spec of a module to be imported in place of that (None: that one itself), and
``change(module)`` for one that has been imported already.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle.cloudpickle

from mlaunch.features import FEATURES
from mlaunch.protocol.spec import Context

_bare: list[object] = []  # the latest function and the ``__main__`` made for it, if nothing of the caller's came along
_FEATURES = {module: feature.name for feature in FEATURES for module in feature.stands_in}


def install_main(function: Callable[..., Any], context: Context) -> None:
    """Make ``__main__`` of this rank look like the caller's, as far as function and arguments have brought it along.

    So that plain pickle (torch.save, all_gather_object) finds the classes that the caller's script defined, values
    can go back to the caller by name, and multiprocessing finds the script.
    """
    arrived = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    # A call on ranks that stay comes here each time, mostly with nothing new.
    if _bare == [function, sys.modules.get("__main__")] and not arrived:
        return
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    from_main = namespace.get("__name__") == "__main__"
    main = types.ModuleType("__main__")
    _bare[:] = [function, main] if not from_main and not arrived else []
    for kind in list(arrived.values()):
        name = getattr(kind, "__qualname__", kind.__name__)  # a TypeVar arrives like a class, and has a plain name
        if kind.__module__ == "__main__" and "<locals>" not in name:
            # cloudpickle has made these classes outside of any module; torch.save and others look them up by name.
            _put(main, name.split("."), kind)
    if from_main:  # it knows what its names mean, of several classes that have one
        main.__dict__.update(namespace)
    if context.main_file is not None:
        main.__file__ = context.main_file
    if context.main_name is not None:  # python -m
        main.__spec__ = importlib.machinery.ModuleSpec(context.main_name, None, origin=context.main_file)
        main.__package__ = context.main_name.rpartition(".")[0]
    sys.modules["__main__"] = main


def _put(main: types.ModuleType, path: list[str], kind: object) -> None:
    """Put a class where its qualified name leads.

    A namespace takes the place of an enclosing class that has not arrived; one that has arrived holds it already.
    """
    place: Any = main
    for name in path[:-1]:
        if not hasattr(place, name):
            setattr(place, name, types.SimpleNamespace())
        place = getattr(place, name)
    if isinstance(place, types.ModuleType | types.SimpleNamespace):
        setattr(place, path[-1], kind)


class LateHook:
    """A ``sys.breakpointhook`` until a feature has one of its own. ``who`` returns "rank 1 of train()"."""

    def __init__(self, who: Callable[[], str]) -> None:
        self._who = who
        self._pid = os.getpid()

    @property
    def __call__(self) -> Callable[..., Any]:
        """The function to call: returned and not called here, as a debugger stops in the frame of its caller."""
        from mlaunch.core.load import at_breakpoint  # which most ranks do not need

        return at_breakpoint(self._who(), self._pid)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _FEATURES:
            return None
        rank = _rank_of(name)
        found: importlib.machinery.ModuleSpec | None = None if rank is None else rank.spec_of(name, path)
        return found


def let_features_stand_in() -> None:
    """Put features' modules in place of others: in later imports, and of those that were imported before the fork."""
    # First, so that a module is made here even where the one that it replaces would be found.
    sys.meta_path.insert(0, _Finder())
    for name in _FEATURES.keys() & sys.modules.keys():
        if (rank := _rank_of(name)) is not None:
            rank.change(sys.modules[name])


def _rank_of(module: str) -> Any:
    from mlaunch.core.load import at_hand  # which most ranks do not need

    return at_hand(_FEATURES[module], "rank")
