"""Run a PyTorch function once per device and get the list of what each rank returned.

The names are resolved when they are first used: importing the package imports neither torch nor the runtime.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from mlaunch._version import __version__

if TYPE_CHECKING:
    from mlaunch import comm
    from mlaunch.agreed_stop.rank import stopping
    from mlaunch.base.exceptions import LaunchError, LaunchTimeout, RankFailure, RanksLost
    from mlaunch.caller.launcher import launcher
    from mlaunch.caller.report.launch_report import LaunchReport, RankReport, Span
    from mlaunch.caller.warm_up import warm_up
    from mlaunch.compat.caller import Server, launch
    from mlaunch.compat.rank.join import (
        init_process_group,
        join,
        join_from_env,
        join_from_openmpi,
        join_from_slurm,
        join_from_torch,
    )
    from mlaunch.compat.rank.megengine import (
        WORLD,
        Client,
        Group,
        bcast_list_,
        get_backend,
        get_client,
        get_local_device_id,
        get_py_server_addr,
        get_rank,
        get_world_size,
        group_barrier,
        is_distributed,
        make_allreduce_cb,
        new_group,
        override_backend,
        synchronized,
    )
    from mlaunch.rank.for_users import RankZeroFilter, device, progress, report, step
    from mlaunch.ranks.caller.held import Held, scatter
    from mlaunch.ranks.caller.ranks import Ranks
    from mlaunch.sweeps.caller.run_future import Run
    from mlaunch.sweeps.caller.sweep import Sweep

_NAMES = {
    "mlaunch.caller.launcher": "launcher",
    "mlaunch.errors": "LaunchError LaunchTimeout RankFailure RanksLost",
    "mlaunch.ranks.caller.held": "Held scatter",
    "mlaunch.ranks.caller.ranks": "Ranks",
    "mlaunch.compat.caller": "Server launch",
    "mlaunch.sweeps.caller.run_future": "Run",
    "mlaunch.sweeps.caller.sweep": "Sweep",
    "mlaunch.compat.rank.megengine": "WORLD Client Group bcast_list_ get_backend get_client get_local_device_id "
    "get_py_server_addr get_rank get_world_size group_barrier is_distributed make_allreduce_cb new_group "
    "override_backend synchronized",
    "mlaunch.compat.rank.join": "init_process_group join join_from_env join_from_openmpi join_from_slurm "
    "join_from_torch",
    "mlaunch.rank.for_users": "RankZeroFilter device progress report step",
    "mlaunch.agreed_stop.rank": "stopping",
    "mlaunch.caller.report.launch_report": "LaunchReport RankReport Span",
    "mlaunch.caller.warm_up": "warm_up",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "WORLD",
    "Client",
    "Group",
    "Held",
    "LaunchError",
    "LaunchReport",
    "LaunchTimeout",
    "RankFailure",
    "RankReport",
    "RankZeroFilter",
    "Ranks",
    "RanksLost",
    "Run",
    "Server",
    "Span",
    "Sweep",
    "__version__",
    "bcast_list_",
    "comm",
    "device",
    "get_backend",
    "get_client",
    "get_local_device_id",
    "get_py_server_addr",
    "get_rank",
    "get_world_size",
    "group_barrier",
    "init_process_group",
    "is_distributed",
    "join",
    "join_from_env",
    "join_from_openmpi",
    "join_from_slurm",
    "join_from_torch",
    "launch",
    "launcher",
    "make_allreduce_cb",
    "new_group",
    "override_backend",
    "progress",
    "report",
    "scatter",
    "step",
    "stopping",
    "synchronized",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name in {"comm", "errors"}:
        return importlib.import_module(f"mlaunch.{name}")
    home = _HOMES.get(name)
    if home is None:
        from mlaunch.base.ported_names import missing

        raise missing(name, sys._getframe(1))
    globals()[name] = value = getattr(importlib.import_module(home), name)
    return value


def load_ipython_extension(shell: Any) -> None:
    """Add ``%ranks`` and ``%%ranks`` to a notebook. IPython calls it for ``%load_ext mlaunch``."""
    importlib.import_module("mlaunch.cells.kernel").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks of the magics, and remove the magics. IPython calls it for ``%unload_ext mlaunch``."""
    importlib.import_module("mlaunch.cells.kernel").unload(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
