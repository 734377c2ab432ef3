"""Under srun each task is one rank, and the call joins the others."""

import torch
import torch.distributed as dist

import mlaunch


@mlaunch.launcher()
def train(lr):
    total = torch.tensor(lr * (dist.get_rank() + 1), device=mlaunch.device())
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, total {total.item()}")
    return total.item()


values = train(0.5)  # under srun a list of one: this task's own
