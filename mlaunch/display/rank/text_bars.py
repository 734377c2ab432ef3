"""Text bars for ``tqdm.notebook`` in ranks: a rank has no kernel, so its widgets would reach no notebook."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from types import ModuleType
from typing import Any

NAME = "tqdm.notebook"


class _TextBars(importlib.abc.Loader):
    """A loader of the module, whose name pickled functions of a notebook refer to."""

    def exec_module(self, module: ModuleType) -> None:
        from tqdm import std

        class Bar(std.tqdm):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **_for_text(kwargs))

        def bars(*args: Any, **kwargs: Any) -> Bar:
            return Bar(range(*args), **kwargs)

        vars(module).update(tqdm=Bar, tqdm_notebook=Bar, trange=bars, tnrange=bars, IProgress=None, WARN_NOIPYW="")


def spec() -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module to be imported in place of tqdm's."""
    return importlib.util.spec_from_loader(NAME, _TextBars())


def change(module: ModuleType) -> None:
    """Change the bars of a module that a fork of the caller has imported already."""
    bar = getattr(module, "tqdm_notebook", None)
    if bar is not None:
        _turn_to_text(bar)


def _turn_to_text(bar: Any) -> None:
    """Remove from the class of widgets all methods of its own that draw."""
    from tqdm import std

    # The class is changed, not replaced: a function that came by value may hold it, or a subclass.
    for name in vars(bar).keys() & vars(std.tqdm).keys() - {"__module__", "__doc__", "__init__"}:
        delattr(bar, name)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        super(bar, self).__init__(*args, **_for_text(kwargs))

    bar.__init__ = begin


def _for_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a widget without those that only widgets have."""
    width = kwargs.get("ncols")
    left_out = {"display", *(("ncols",) if isinstance(width, str) else ())}  # such as "100%"
    return {name: value for name, value in kwargs.items() if name not in left_out}
