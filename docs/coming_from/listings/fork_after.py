"""Estimates pi on two ranks, which inherit the data and return what they count."""

import torch
import torch.distributed as dist

from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu", start_method="fork")
def count(points):
    mine = points[dist.get_rank() :: 2]
    return int((mine.square().sum(dim=1) < 1).sum())


points = torch.rand(200_000, 2, generator=torch.Generator().manual_seed(0))
inside = sum(count(points))
print(f"pi is about {4 * inside / len(points):.4f}")
