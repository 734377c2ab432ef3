"""What cells have left in this rank: to be brought to the notebook, set from there, or listed."""

from __future__ import annotations

import os
import resource
import types
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.cells.rank.run_cell import main, main_of_cells, rank, shell
from mlaunch.cells.wire import NamesOfRank
from mlaunch.rank.by_looking import is_a, size, type_name

# What is imported or defined is in the cells to be seen; asked for is what takes memory.
_HIDDEN = (types.ModuleType, types.FunctionType, type)
_THEIRS = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})  # IPython's


def get_ready_for_cells() -> None:
    """Opens the shell, so that the first cell need not."""
    with main_of_cells():
        shell()


def pull(names: Sequence[str], targets: Sequence[int] | None) -> dict[str, Any] | None:
    """Returns the values of those names that are here; None on a rank that is no target."""
    if targets is not None and rank() not in targets:
        return None
    found = vars(main)
    return {name: found[name] for name in names if name in found}


def push(values: Mapping[str, Any], targets: Sequence[int] | None) -> None:
    """Sets names."""
    if targets is None or rank() in targets:
        vars(main).update(values)


def describe_names() -> NamesOfRank:
    """Says what this rank holds."""
    import torch

    names = {name: _look(value) for name, value in list(vars(main).items()) if _is_told(name, value)}
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    cuda: Any = torch.cuda  # untyped in part
    # Only where the function has used CUDA: to ask would start it, which takes hundreds of MB of the device.
    on_device = cuda.memory_allocated() if cuda.is_initialized() else 0
    return NamesOfRank(os.getpid(), resident, on_device, names)


def _is_told(name: object, value: object) -> bool:
    """True for what a cell has made, and is not there to be seen in the cell alone."""
    is_cells = type(name) is str and not name.startswith("_") and name not in _THEIRS
    return is_cells and not any(is_a(value, kind) for kind in _HIDDEN)


def _look(value: object) -> tuple[str, int]:
    """Returns the type and the bytes; "?" of what cannot be looked at, which costs the others nothing."""
    try:
        return type_name(value), size(value)
    except Exception:  # there are fields in C that raise
        return "?", 0
