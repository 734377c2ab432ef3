"""Where the parts put their tensors: on the machine's devices; in memory where the accelerator has no hardware.

And what all of them say."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

_ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
KIND = _ACCELERATOR.type if _ACCELERATOR is not None else "cpu"
HAS_TENSORS = KIND != "toy"


def place() -> str:
    """Returns the device of tensors; the current one of its kind."""
    return KIND if HAS_TENSORS else "cpu"


def backend() -> str:
    """Returns the backend of such tensors."""
    return dist.Backend.default_device_backend_map.get(place(), "gloo")


def count() -> int:
    """Returns the number of devices."""
    return torch.accelerator.device_count()


def check(holds: object, words: str) -> None:
    """Says what was looked at, and ends the part if it does not hold."""
    print(f"{'yes' if holds else 'NO'}: {words}", flush=True)
    if not holds:
        sys.exit(1)


def needs_tensors() -> None:
    """Ends the part with a word where the accelerator has no hardware."""
    if not HAS_TENSORS:
        print("not tried: it needs tensors on the device")
        sys.exit(0)
