"""Finds what of a call a rank could not unpickle, by unpickling it once more with pickle's own code in Python."""

from __future__ import annotations

import io
import itertools
import pickle
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from mlaunch.protocol import explain

_FIELDS = {"function", "args", "kwargs"}  # of a Call
_BUILDS = {"load_build": "inst", "load_newobj": "cls", "load_newobj_ex": "cls", "load_reduce": "func"}


class _Unpickler(pickle._Unpickler):
    """Keeps where it has come to."""

    stack: list[Any]
    metastack: list[list[Any]]


def culprit(stream: bytes | memoryview, buffers: Iterable[Any]) -> str:
    """Says what could not be made, where it stands, and what to do; "" if it can be, the second time."""
    unpickler = _Unpickler(io.BytesIO(stream), buffers=buffers)
    try:
        unpickler.load()
    except Exception as error:  # whatever a __setstate__ may raise
        where = _path([*unpickler.metastack, unpickler.stack])
        return _in_words(where, _made(error), error)
    return ""


def _made(error: Exception) -> str:
    """Names the class, function or module that pickle was busy with."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") != "pickle":
            continue
        name, found = frame.f_code.co_name, frame.f_locals
        if name == "find_class":
            return f"{found['module']}.{found['name']}"
        if name in _BUILDS and _BUILDS[name] in found:
            return _name_of(found[_BUILDS[name]], found.get("args", ()))
    return ""


def _name_of(found: Any, args: Sequence[Any]) -> str:
    if not isinstance(found, type) and not callable(found):
        return explain.type_name(found)
    kind = next((arg for arg in args if isinstance(arg, type)), found)
    kind = type(found) if not hasattr(kind, "__qualname__") else kind
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.").removeprefix("builtins.")


def _path(levels: Sequence[list[Any]]) -> list[str]:
    """Returns the names under which what was being made stands, from outside: of globals, keys, attributes."""
    names: list[str] = []
    opened: list[Any] = []  # what the level above has begun
    for found in levels:
        level = [one if type(one) in {str, dict} else None for one in found]  # others may refuse to be compared
        begun = 0
        if opened and isinstance(opened[-1], dict):  # here stand keys and values in turn; the last value is not whole
            begun = max((at for at in range(0, len(level), 2) if isinstance(level[at], str)), default=0)
            names += [key for key in level[begun : begun + 1] if isinstance(key, str)]
        pairs = itertools.pairwise(level[begun:])
        names += [key for before, key in pairs if isinstance(before, dict) and isinstance(key, str)]
        opened = level
    return names


def _in_words(names: list[str], made: str, error: Exception) -> str:
    path = ".".join(name for name in names if name not in _FIELDS and not name.startswith("__"))
    if isinstance(error, ImportError):
        return (
            f"of what the call sends, the rank could not import {made}: put its directory on sys.path before the call, "
            f"or send its module along (cloudpickle.register_pickle_by_value)"
        )
    what = (f"a {made}" if made else "an object") + (f" at {path!r}" if path else "")
    return (
        f"of what the call sends, the rank could not unpickle {what}: create such an object inside the function, or "
        f"give its class a __reduce__ that another process can follow"
    )
