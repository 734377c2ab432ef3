"""Has ``tqdm.notebook`` draw text in ranks, whose widgets no notebook would hear of: a rank has no kernel."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME = "tqdm.notebook"


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for the module, under which functions of a notebook are pickled by name."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == _NAME else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm import std

        class Bar(std.tqdm):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("display", None)
                if isinstance(kwargs.get("ncols"), str):  # such as "100%"
                    del kwargs["ncols"]
                super().__init__(*args, **kwargs)

        def bars(*args: Any, **kwargs: Any) -> Bar:
            return Bar(range(*args), **kwargs)

        vars(module).update(tqdm=Bar, tqdm_notebook=Bar, trange=bars, tnrange=bars, IProgress=None, WARN_NOIPYW="")


def install() -> None:
    """Affects imports that come later."""
    sys.meta_path.insert(0, _TextBars())
