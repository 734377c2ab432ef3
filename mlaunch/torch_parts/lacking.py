"""What a torch lacks that mlaunch uses: said once in a process, and all of it in ``mlaunch doctor``."""

from __future__ import annotations

import importlib
import os

from mlaunch.base.log import log

TRIED = "2.6 to 2.15"
# Each has a function ``lacks``: "NAME IN TORCH: what follows", or "" if it has all.
_PARTS = ("process_groups", "operations", "limits", "recorder", "default_device", "model_times")
_told: set[str] = set()


def sentence(lack: str) -> str:
    """Return it as a sentence for people. ``lack``: what a part has found."""
    import torch

    thing, _, follows = lack.partition(": ")
    return f"torch {torch.__version__} has no {thing}, so {follows} (mlaunch was tried with torch {TRIED})"


def tell(lack: str) -> None:
    """Say it once in this process, and in one rank of a machine."""
    if lack not in _told and os.environ.get("LOCAL_RANK", "0") == "0":
        _told.add(lack)
        log.warning("%s", sentence(lack))


def everything() -> list[str]:
    """Return what this torch lacks, a sentence each. It imports no part of torch that nobody uses."""
    found = [importlib.import_module(f"mlaunch.torch_parts.{part}").lacks() for part in _PARTS]
    return [sentence(lack) for lack in found if lack]
