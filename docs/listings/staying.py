"""Two ranks keep a model and its optimizer between calls."""

import torch

from mlaunch import Ranks, device, scatter


def build(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1).to(device())
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def step(training: tuple[torch.nn.Module, torch.optim.Optimizer], batch: torch.Tensor) -> float:
    model, optimizer = training
    loss = (model(batch.to(device())) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


batches = [torch.ones(8, 4), torch.ones(8, 4)]
with Ranks(n_gpus=2) as ranks:  # the options of launcher
    training = ranks.hold(build, 4)  # runs on every rank; what it returns stays there
    first = ranks.run(step, training, scatter(batches))  # a list, one value per rank
    for _ in range(20):
        last = ranks.submit(step, training, batches[0])  # a concurrent.futures.Future
    weights = training.fetch(rank=0)[0].state_dict()
    print(f"{first[0]:.3f}, then {last.result()[0]:.3f}; {sum(value.numel() for value in weights.values())} weights")
