"""Engines place the ranks of one call on several machines: ``train.options(engine=Hosts(["a", "b"]))(0.1)``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaunch.engines.caller.cluster import Cluster
    from mlaunch.engines.caller.command_engine import Command
    from mlaunch.engines.caller.engine import Engine
    from mlaunch.engines.caller.hosts import Hosts
    from mlaunch.engines.caller.placement import Ends, Placement
    from mlaunch.engines.caller.ray import Ray
    from mlaunch.engines.caller.slurm import Slurm

_HOMES = {
    "Cluster": "cluster",
    "Command": "command_engine",
    "Ends": "placement",
    "Engine": "engine",
    "Hosts": "hosts",
    "Placement": "placement",
    "Ray": "ray",
    "Slurm": "slurm",
}

__all__ = ["Cluster", "Command", "Ends", "Engine", "Hosts", "Placement", "Ray", "Slurm"]


def __getattr__(name: str) -> Any:
    # Late: members, on other machines, import this package without what their caller runs.
    if name not in _HOMES:
        raise AttributeError(f"module 'mlaunch.engines' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"mlaunch.engines.caller.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
