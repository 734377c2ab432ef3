import torch
import torch.distributed as dist

from mlaunch import device, launcher


@launcher(n_gpus=2)
def count(samples):
    generator = torch.Generator().manual_seed(dist.get_rank())
    points = torch.rand(samples, 2, generator=generator).to(device())
    inside = (points.square().sum(1) < 1).sum()
    dist.all_reduce(inside)
    return inside.item()


samples = 100_000
inside = count(samples)
print(f"pi is about {4 * inside[0] / (len(inside) * samples):.4f}")
