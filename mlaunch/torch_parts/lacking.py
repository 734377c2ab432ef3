"""Parts that a torch lacks and mlaunch uses: reported once in a process, and all of them by ``mlaunch doctor``."""

from __future__ import annotations

import importlib
import os

from mlaunch.base.log import log

TRIED = "2.6 to 2.15"
# Functions that return "NAME IN TORCH: the consequence", or "", by module.
_LACKS = {
    "process_groups": ("lacks", "limits_lack", "recorder_lacks"), "operations": ("lacks",),
    "default_device": ("lacks",), "model_times": ("lacks",),
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
