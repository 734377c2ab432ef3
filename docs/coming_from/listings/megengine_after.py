import numpy as np
import torch
from torch.nn.functional import mse_loss

import mlaunch as dist


@dist.launcher(n_gpus=2)
def train(lr):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.random.default_rng(0).standard_normal((64, 3), dtype="float32")
    x = torch.tensor(x[rank::size], device=dist.device())
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(3, 1, device=dist.device())
    dist.bcast_list_(model.parameters())
    average = dist.make_allreduce_cb("mean")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(100):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.sum().item()


print("sum of weights on each rank:", [round(weights, 3) for weights in train(0.3)])
