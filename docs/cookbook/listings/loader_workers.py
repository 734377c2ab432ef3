"""Two ranks read their halves of a data set with two worker processes each."""

import os

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mlaunch


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return index, index**2, os.getpid()


@mlaunch.launcher(n_gpus=2)
def read(epoch):
    device = mlaunch.device()
    data = Squares()
    sampler = DistributedSampler(data, shuffle=True, seed=7)
    sampler.set_epoch(epoch)
    loader = DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork",
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    seen, total, workers = [], torch.zeros((), device=device), set()
    for index, square, pid in loader:
        total += square.to(device, non_blocking=True).sum()
        seen += index.tolist()
        workers |= set(pid.tolist())
    return seen, total.item(), len(workers)


halves = read(epoch=0)
for rank, (seen, total, workers) in enumerate(halves):
    print(f"rank {rank}: {len(seen)} items from {workers} workers, sum {total:.0f}")
