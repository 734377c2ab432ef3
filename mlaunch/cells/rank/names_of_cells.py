"""The names that cells have left in this rank: returned to the notebook, set from there, or listed."""

from __future__ import annotations

import os
import resource
import types
from collections.abc import Mapping, Sequence
from typing import Any

from mlaunch.cells.rank.run_cell import main, main_of_cells, rank, shell
from mlaunch.cells.wire import NamesOfRank
from mlaunch.rank.safe_inspection import is_a, size, type_name

_NO_VALUES = (types.ModuleType, types.FunctionType, type)  # what cells import or define
_IPYTHONS = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})  # names


def get_ready_for_cells() -> None:
    """Open the shell, before the first cell."""
    with main_of_cells():
        shell()


def pull(names: Sequence[str], targets: Sequence[int] | None) -> dict[str, Any] | None:
    """Return the values of these names that are here; None on a rank that is not a target."""
    if targets is not None and rank() not in targets:
        return None
    found = vars(main)
    return {name: found[name] for name in names if name in found}


def push(values: Mapping[str, Any], targets: Sequence[int] | None) -> None:
    """Set names on the targets."""
    if targets is None or rank() in targets:
        vars(main).update(values)


def describe_names() -> NamesOfRank:
    """Return what this rank holds."""
    import torch

    values = {name: value for name, value in list(vars(main).items()) if is_value(name, value)}
    names = {name: _type_and_size(value) for name, value in values.items() if not name.startswith("_")}
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    cuda: Any = torch.cuda  # untyped in part
    # Only if cells have used CUDA: to ask would initialize it, which takes hundreds of MB of the device.
    on_device = cuda.memory_allocated() if cuda.is_initialized() else 0
    return NamesOfRank(os.getpid(), resident, on_device, names)


def is_value(name: object, value: object) -> bool:
    """True for a value of a cell: not IPython's, nor what is imported or defined, which takes no memory."""
    return type(name) is str and name not in _IPYTHONS and not any(is_a(value, kind) for kind in _NO_VALUES)


def _type_and_size(value: object) -> tuple[str, int]:
    """Return the type and the bytes of a value; "?" if that cannot be found out."""
    try:
        return type_name(value), size(value)
    except Exception:  # some fields in C raise
        return "?", 0
