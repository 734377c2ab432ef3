"""``mlaunch.device``: the device of this rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mlaunch.rank.joining import recognise
from mlaunch.rank.joining.recognise import RankInfo

if TYPE_CHECKING:
    import torch

bound: torch.device | None = None  # what this process has bound, if it has become a rank


def note_device(device_of_rank: torch.device | None) -> torch.device | None:
    """Note the device that this process has bound; return the one noted before."""
    global bound
    before, bound = bound, device_of_rank
    return before


def device() -> torch.device:
    """Return this rank's device, where its model and its data belong: "cuda:1", "cpu".

    Works in ranks of mlaunch, in ranks that have joined, and in those of another launcher before they join. In any
    other process it is the CPU.

    Example:
        >>> @launcher(n_gpus=4)
        ... def train():
        ...     model = Model().to(mlaunch.device())
    """
    import torch

    if bound is not None:
        return bound
    place = recognise.recognise(os.environ)
    if place is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return device_at(place, None if accelerator is None else accelerator.type)


def device_at(info: RankInfo, accelerator: str | None) -> torch.device:
    """Return the device that a rank at this place takes, of those that it sees. ``accelerator``: None for the CPU."""
    import torch

    if accelerator is None:
        return torch.device("cpu")
    # Where the launcher sets no local rank, all machines are taken to have equally many devices.
    local_rank = info.rank if info.local_rank is None else info.local_rank
    return torch.device(accelerator, local_rank % torch.accelerator.device_count())
