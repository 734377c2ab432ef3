"""Which of torch's own modules ranks had to import: a note in memory that they share with their fork server."""

from __future__ import annotations

import mmap
import sys

# What torch imports where it is first used. The first optimizer and the first DistributedDataParallel of a process
# import torch._dynamo, a second of each rank's time.
_NAMES = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")

_noted = mmap.mmap(-1, len(_NAMES))  # a fork writes to the same memory


def note() -> None:
    """Notes what this process has imported."""
    for index, name in enumerate(_NAMES):
        if name in sys.modules:
            _noted[index] = 1


def missing() -> list[str]:
    """Returns what a fork of this process has noted and this process has not imported."""
    return [name for index, name in enumerate(_NAMES) if _noted[index] and name not in sys.modules]
