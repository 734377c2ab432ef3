"""Lightning's Fabric on two ranks."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import mlaunch


@mlaunch.launcher(n_gpus=2)
def train():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=mlaunch.device().type, devices=2, strategy="ddp")
    fabric.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    return fabric.world_size, len(loader), model.module.weight.sum().item()


print(train())
