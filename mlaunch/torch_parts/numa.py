"""torch's way to bind a process to the cores beside a device, which it offers to its own launcher alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_BIND = "_maybe_apply_numa_binding_to_current_process"
_INDEX = ("device_index", "gpu_index")  # torch 2.14 calls it by another name


def lacks() -> str:
    """Return what this torch has not, and what follows; "" if it has all. Looks without an import of torch.numa."""
    import importlib.util

    if importlib.util.find_spec("torch.numa") is None:
        return "torch.numa: --numa-binding is refused; torch 2.9 has it"
    return ""


def bind(local_rank: int, mode: str) -> None:
    """Bind this process to the cores beside the device of this number.

    Raises:
        RuntimeError: This torch cannot; it says what is not there.
    """
    try:
        from torch.numa import binding
    except ModuleNotFoundError as error:
        raise RuntimeError("--numa-binding: this torch has no torch.numa; a later one has") from error
    found: Callable[..., None] | None = getattr(binding, _BIND, None)
    taken = [name for name in _INDEX if found is not None and name in inspect.signature(found).parameters]
    if found is None or not taken:
        from mlaunch.torch_parts import lacking

        lack = f"torch.numa.binding.{_BIND}({' or '.join(_INDEX)}): --numa-binding cannot be kept; leave it out"
        raise RuntimeError(f"--numa-binding: {lacking.sentence(lack)}")
    options: Any = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    found(**{taken[0]: local_rank, "numa_options": options})
