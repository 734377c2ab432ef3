import torch
import torch.distributed as dist

import mlaunch


def main():
    mlaunch.join_from_torch(seed=42)
    device = mlaunch.device()
    points = torch.rand(200_000, 2)  # the same on all ranks, which have the same seed
    mine = points[dist.get_rank() :: dist.get_world_size()].to(device)
    inside = (mine.square().sum(1) < 1).sum()
    dist.all_reduce(inside)
    if dist.get_rank() == 0:
        print(f"pi is about {4 * inside.item() / len(points):.4f}")


if __name__ == "__main__":
    main()
