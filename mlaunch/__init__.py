"""Run a PyTorch function once per device and get the list of what each rank returned.

The names are resolved when they are first used: importing the package imports neither torch nor the runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlaunch._version import __version__

if TYPE_CHECKING:
    from mlaunch.decorator import launcher
    from mlaunch.errors import LaunchError, LaunchTimeout, RankFailure
    from mlaunch.warm import warm_up

__all__ = ["LaunchError", "LaunchTimeout", "RankFailure", "__version__", "launcher", "warm_up"]

_HOMES = {
    "LaunchError": "mlaunch.errors",
    "LaunchTimeout": "mlaunch.errors",
    "RankFailure": "mlaunch.errors",
    "launcher": "mlaunch.decorator",
    "warm_up": "mlaunch.warm",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mlaunch' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
