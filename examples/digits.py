"""Data-parallel training of a small network on scikit-learn's handwritten digits.

Run one rank per GPU, or two on the CPU, and print the accuracy that each rank measured on the held-out digits.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mlaunch import launcher

HELD_OUT = 360  # of 1797 digits


def load() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(images[rest], labels[rest]), TensorDataset(images[held_out], labels[held_out])


@launcher(n_gpus=None if torch.accelerator.is_available() else 2)
def train(data: TensorDataset, held_out: TensorDataset, epochs: int, lr: float, width: int = 128) -> float:
    """Return the accuracy on the held-out digits, as this rank measures it."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    network = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    sampler = DistributedSampler(data, seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=32, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 5 == 0:
            print(f"epoch {epoch:2}: loss {loss.item():.3f}")
    images, labels = held_out.tensors
    with torch.no_grad():
        guesses = network(images.to(device)).argmax(dim=1).cpu()
    return (guesses == labels).float().mean().item()


if __name__ == "__main__":
    accuracies = train(*load(), epochs=20, lr=2e-3)
    for rank, accuracy in enumerate(accuracies):
        print(f"rank {rank} measured an accuracy of {accuracy:.3f}")
