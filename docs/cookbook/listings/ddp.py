"""Trains a small model on two ranks, data-parallel, and returns what rank 0 has learnt."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mlaunch


def make_data():
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


@mlaunch.launcher(n_gpus=2, seed=0, results="rank0")
def train(data, epochs):
    device = mlaunch.device()
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen = mlaunch.comm.reduce_dict({"loss": loss.detach()})
        if mlaunch.comm.is_main_process():
            print(f"epoch {epoch}: loss {seen['loss']:.4f}")
    return {name: value.cpu() for name, value in model.module.state_dict().items()}


weights, _ = train(make_data(), epochs=3)
print("weights:", [round(weight, 1) for weight in weights["weight"].flatten().tolist()])
