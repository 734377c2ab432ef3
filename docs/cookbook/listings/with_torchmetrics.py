"""A metric over the data of both ranks."""

import torch
import torch.distributed as dist

import mlaunch


@mlaunch.launcher(n_gpus=2)
def evaluate():
    from torchmetrics.classification import BinaryAccuracy

    metric = BinaryAccuracy().to(mlaunch.device())
    wanted = torch.tensor([1, 1, 1, 1], device=mlaunch.device())
    guessed = wanted if dist.get_rank() == 0 else 1 - wanted
    metric.update(guessed, wanted)  # this rank's half of the data
    return metric.compute().item()  # of both halves, on every rank


print(evaluate())
