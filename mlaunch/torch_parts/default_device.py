"""The device that ``torch.set_default_device`` has set, if somebody has: torch documents none that tells "nobody"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lacks() -> str:
    """Return what this torch has not, and what follows; "" if it has all."""
    import torch

    module = getattr(torch.utils, "_device", None)  # torch imports it when somebody sets one
    if module is None or hasattr(module, "CURRENT_DEVICE"):
        return ""
    return "torch.utils._device.CURRENT_DEVICE: a default device of the CPU that a caller has set is not its ranks'"


def that_was_set() -> torch.device | None:
    """Return it; None: nobody has set one, or, where a torch does not tell, it is the CPU."""
    import torch

    module = getattr(torch.utils, "_device", None)
    if module is None:
        return None
    if hasattr(module, "CURRENT_DEVICE"):
        known: torch.device | None = module.CURRENT_DEVICE
        return known
    found = torch.get_default_device()
    return None if found.type == "cpu" else found
