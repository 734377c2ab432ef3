"""Parts that a torch lacks and mlaunch uses: reported once in a process, and all of them by ``mlaunch doctor``.

And what no documented function of torch tells: the device of ``torch.set_default_device``, if that was called.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from mlaunch.base.log import log

if TYPE_CHECKING:
    import torch


TRIED = "2.6 to 2.15"
# Functions that return "NAME IN TORCH: the consequence", or "", by module.
_LACKS = {
    "process_groups": ("lacks", "limits_lack", "recorder_lacks"), "operations": ("lacks",),
    "lacking": ("default_device_lacks",), "model_times": ("lacks",),
}  # fmt: skip
_told: set[str] = set()


def sentence(lack: str) -> str:
    """Return the sentence about a lack. ``lack``: as from one of ``_LACKS``."""
    import torch

    thing, _, follows = lack.partition(": ")
    return f"torch {torch.__version__} has no {thing}, so {follows} (mlaunch was tried with torch {TRIED})"


def tell(lack: str) -> None:
    """Report a lack once in this process, and in one rank of a machine."""
    if lack not in _told and os.environ.get("LOCAL_RANK", "0") == "0":
        _told.add(lack)
        log.warning("%s", sentence(lack))


def everything() -> list[str]:
    """Return a sentence about each part that this torch lacks. It imports no part of torch that is not in use."""
    parts = {importlib.import_module(f"mlaunch.torch_parts.{part}"): names for part, names in _LACKS.items()}
    found = [getattr(part, name)() for part, names in parts.items() for name in names]
    return [sentence(lack) for lack in found if lack]


def default_device_lacks() -> str:
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
