import argparse

import torch
from accelerate import Accelerator

from mlaunch import launcher


# Or "bf16", as --mixed_precision bf16.
@launcher(n_gpus=2, env={"ACCELERATE_MIXED_PRECISION": "no"})
def train(lr):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return accelerator.reduce(loss.detach(), "mean").item()


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
losses = train(parser.parse_args().lr)
print(f"loss {losses[0]:.4f}")
