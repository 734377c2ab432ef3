"""Writes TensorBoard's files from rank 0: the mean of all ranks' losses."""

import sys
from contextlib import nullcontext

import torch
from torch.utils.tensorboard import SummaryWriter

import mlaunch
from mlaunch import comm


@mlaunch.launcher(n_gpus=2, seed="per-rank:0")
def train(folder, steps):
    with SummaryWriter(folder) if comm.is_main_process() else nullcontext() as writer:
        for step in range(steps):
            loss = torch.rand((), device=mlaunch.device()) / (step + 1)
            mean = comm.reduce_dict({"loss": loss})  # every rank takes part
            if writer is not None:
                writer.add_scalar("loss", mean["loss"], step)


train(sys.argv[1] if sys.argv[1:] else "runs", steps=10)
