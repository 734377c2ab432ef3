"""Accelerate finds the process group that mlaunch has made."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import mlaunch


@mlaunch.launcher(n_gpus=2, seed=0)
def train():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=mlaunch.device().type == "cpu")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"{accelerator.num_processes} processes, {len(loader)} batches each")
    return accelerator.unwrap_model(model).weight.sum().item()


print(train())
