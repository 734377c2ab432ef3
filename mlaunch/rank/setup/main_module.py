"""The ``__main__`` of a rank that runs a function."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle

from mlaunch.protocol.spec import Context

_bare: list[object] = []  # the latest function and what it got, if it brought nothing along


def install_main(function: Callable[..., Any], context: Context) -> None:
    """Makes ``__main__`` of this rank look like the caller's, as far as function and arguments brought it along.

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
    """Puts a class where its name leads. A class around it that has not come is stood in for; one that has knows it."""
    place: Any = main
    for name in path[:-1]:
        if not hasattr(place, name):
            setattr(place, name, types.SimpleNamespace())
        place = getattr(place, name)
    if isinstance(place, types.ModuleType | types.SimpleNamespace):
        setattr(place, path[-1], kind)
