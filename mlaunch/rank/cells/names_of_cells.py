"""What cells have left in this rank: to be brought to the notebook, set from there, or listed."""

from __future__ import annotations

import os
import resource
import types
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.protocol.messages.cell_messages import NamesOfRank
from mlaunch.rank import held_objects
from mlaunch.rank.cells.run_cell import main, main_of_cells, rank, shell

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

    names = {}
    for name, value in sorted(vars(main).items()):
        if not name.startswith("_") and name not in _THEIRS and not isinstance(value, _HIDDEN):
            described = held_objects.describe(value)
            names[name] = described.type_name, described.size
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    cuda: Any = torch.cuda  # untyped in part
    # Only where the function has used CUDA: to ask would start it, which takes hundreds of MB of the device.
    on_device = cuda.memory_allocated() if cuda.is_initialized() else 0
    return NamesOfRank(os.getpid(), resident, on_device, names)
