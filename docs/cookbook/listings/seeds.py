"""What the ranks draw with each kind of seed."""

import random

import torch
from torch.utils.data import DataLoader

import mlaunch


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.rand(())


def draw():
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(Noise(), num_workers=1, multiprocessing_context="fork")
    drawn = [model.weight.item(), random.random(), *(x.item() for x in loader)]
    return [round(value, 4) for value in drawn]


for seed in (7, "per-rank:7", None):
    print(f"seed={seed!r}:", *mlaunch.launcher(draw, n_gpus=2, seed=seed)())
