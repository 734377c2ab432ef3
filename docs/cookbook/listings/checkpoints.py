"""Saves a checkpoint after each epoch, and resumes from the last one after a failure."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mlaunch


def save(folder, epoch, model, optimizer):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    part = folder / "part"
    torch.save(state, part)
    # A file with such a name is complete.
    os.replace(part, folder / f"epoch_{epoch:04}.pt")


def resume(folder, model, optimizer):
    complete = sorted(folder.glob("epoch_*.pt"))
    if not complete:
        return 0
    state = torch.load(complete[-1], map_location=mlaunch.device())
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


@mlaunch.launcher(n_gpus=2, max_restarts=2, seed="per-rank:0")
def train(folder, epochs):
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(mlaunch.device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = resume(folder, model, optimizer)
    first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for epoch in range(first, epochs):
        if epoch == 3 and dist.get_rank() == 1 and first_attempt:
            raise RuntimeError("a failure, to show what comes then")
        x = torch.randn(64, 4, device=mlaunch.device())
        loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            save(folder, epoch, model, optimizer)
        dist.barrier()  # nobody begins the next epoch before this one is saved
    return f"epochs {first} to {epochs - 1}"


folder = Path(sys.argv[1] if sys.argv[1:] else "checkpoints")
folder.mkdir(exist_ok=True)
print(train(folder, epochs=6))
