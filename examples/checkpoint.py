"""Train, and save a checkpoint when asked to stop (kill -TERM, mlaunch stop). Called again, continue from there.

It ends with the same weights as a run that nobody stopped.
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import mlaunch


def save(folder, step, model, optimizer):
    """Write, then rename: a folder with this name is complete. Collective: call it on all ranks."""
    part = folder / "part"
    if dist.get_rank() == 0:
        # One may be left by a run that was killed while it wrote.
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(folder / f"step-{step:06}")
    dist.barrier()


def resume(folder, model, optimizer):
    """Load the latest checkpoint, and return the next step. Collective."""
    complete = sorted(folder.glob("step-*"))
    if not complete:
        return 1
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=complete[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(complete[-1].name.removeprefix("step-")) + 1


def batch(step):
    """Return the data of a step, the same in every run."""
    data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(32, 4, generator=data)
    return x, x.sum(dim=1, keepdim=True)


@mlaunch.launcher(n_gpus=2, device_type="cpu", seed=0, stop_on="TERM,USR1", stop_grace=60)
def train(folder, steps, batch=batch):
    """Return the last step that was trained, and the weights."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(resume(folder, model, optimizer), steps + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if mlaunch.stopping() or step == steps:
            save(folder, step, model, optimizer)
            break
    return step, [parameter.tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    folder, steps = Path(sys.argv[1] if sys.argv[1:] else "checkpoints"), 300
    folder.mkdir(exist_ok=True)
    if (folder / f"step-{steps:06}").exists():
        sys.exit(f"{folder} has all {steps} steps; remove it to start again")
    (step, weights), _ = train(folder, steps)
    print(f"{train.last.stopped or 'trained all steps'}; step {step} of {steps} is in {folder}")
