"""The filters of warnings of a caller, which its ranks take over."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from typing import Any

_MOST_FILTERS = 200


def of_this_process() -> tuple[tuple[object, ...], ...]:
    """Returns the filters of warnings, less those of classes that are the script's own."""
    return tuple(
        (action, _pattern(text), f"{kind.__module__}:{kind.__qualname__}", _pattern(module), line)
        for action, text, kind, module, line in warnings.filters[:_MOST_FILTERS]
        # A rank has no __main__ of the script's yet, when filters are set.
        if isinstance(kind, type) and kind.__module__ != "__main__"
    )


def _pattern(found: re.Pattern[str] | str | None) -> tuple[str, int] | str | None:
    return (found.pattern, found.flags) if isinstance(found, re.Pattern) else found


def apply(value: tuple[tuple[Any, ...], ...]) -> None:
    """Takes over what differs here."""
    if value == of_this_process():
        return
    found = []
    for action, text, kind, module, line in value:
        with contextlib.suppress(Exception):  # whatever a module may raise
            found.append((action, _compiled(text), _class(kind), _compiled(module), line))
    warnings.filters[:] = [*found, *(one for one in warnings.filters if one not in found)]  # type: ignore[index]
    # The list was changed in place, which the C code's cache of answers does not notice.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _compiled(found: tuple[str, int] | str | None) -> re.Pattern[str] | str | None:
    return re.compile(*found) if isinstance(found, tuple) else found


def _class(name: str) -> object:
    module, _, qualname = name.partition(":")
    return _found(module, qualname) or _Later(qualname, (Warning,), {"__module__": module, "__qualname__": qualname})


def _found(module: str, qualname: str) -> object:
    """Returns what a module that is imported holds under this name, or None."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


class _Later(type):
    """Stands for a class of warnings whose module is not imported: to import IPython, say, takes half a second."""

    def __subclasscheck__(cls, other: type) -> bool:
        found = _found(cls.__module__, cls.__qualname__)
        return isinstance(found, type) and issubclass(other, found)
