import argparse

import torch
import torch.distributed as dist

from mlaunch import device, launcher


@launcher(n_gpus=2)
def fit(lr):
    torch.manual_seed(0)
    x = torch.randn(64, 3)[dist.get_rank() :: dist.get_world_size()].to(device())
    weight = torch.zeros(3, device=device(), requires_grad=True)
    for _ in range(20):
        loss = (x @ weight - x.sum(1)).square().mean()
        (grad,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(grad)
        weight.data -= lr * grad / dist.get_world_size()
    return loss.item()


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
losses = fit(args.lr)
print(f"loss of rank 0: {losses[0]:.4f}")
