"""The device of ``torch.set_default_device``, if it was called: no documented function of torch tells that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    import torch

    module = getattr(torch.utils, "_device", None)  # torch imports it when a default device is set
    if module is None or hasattr(module, "CURRENT_DEVICE"):
        return ""
    return "torch.utils._device.CURRENT_DEVICE: a default device of the CPU that a caller has set is not its ranks'"


def that_was_set() -> torch.device | None:
    """Return the default device; None if none was set. If this torch does not tell, None for the CPU, too."""
    import torch

    module = getattr(torch.utils, "_device", None)
    if module is None:
        return None
    if hasattr(module, "CURRENT_DEVICE"):
        known: torch.device | None = module.CURRENT_DEVICE
        return known
    found = torch.get_default_device()
    return None if found.type == "cpu" else found
