import argparse

import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
lr = parser.parse_args().lr

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
mean = accelerator.reduce(loss.detach(), "mean").item()
accelerator.print(f"loss {mean:.4f}")
