import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def count(rank, world_size, samples, results):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29511"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    generator = torch.Generator().manual_seed(rank)
    points = torch.rand(samples, 2, generator=generator).to(device)
    inside = (points.square().sum(1) < 1).sum()
    dist.all_reduce(inside)
    if rank == 0:
        results.put(inside.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size, samples = 2, 100_000
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(count, args=(world_size, samples, results), nprocs=world_size)
    print(f"pi is about {4 * results.get() / (world_size * samples):.4f}")
