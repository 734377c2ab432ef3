"""Logs to Weights & Biases from rank 0."""

import os
from contextlib import nullcontext

import torch

import mlaunch
from mlaunch import comm


def begin(**config):
    if not comm.is_main_process():
        return nullcontext()
    import wandb

    return wandb.init(project="mlaunch-cookbook", config=config)


@mlaunch.launcher(n_gpus=2, seed="per-rank:0")
def train(steps, lr):
    with begin(lr=lr) as run:  # its end sends what is still on its way
        for step in range(steps):
            loss = torch.rand((), device=mlaunch.device()) / (step + 1)
            mean = comm.reduce_dict({"loss": loss})  # every rank takes part
            if run is not None:
                run.log({"loss": mean["loss"]}, step=step)


os.environ.setdefault("WANDB_MODE", "offline")  # leave this out to send it to the server
train(steps=10, lr=0.1)
