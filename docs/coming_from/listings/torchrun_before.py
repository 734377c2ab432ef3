import argparse
import os

import torch
import torch.distributed as dist


def fit(lr, device):
    torch.manual_seed(0)
    x = torch.randn(64, 3)[dist.get_rank() :: dist.get_world_size()].to(device)
    weight = torch.zeros(3, device=device, requires_grad=True)
    for _ in range(20):
        loss = (x @ weight - x.sum(1)).square().mean()
        (grad,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(grad)
        weight.data -= lr * grad / dist.get_world_size()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    loss = fit(args.lr, device)
    if dist.get_rank() == 0:
        print(f"loss of rank 0: {loss:.4f}")
    dist.destroy_process_group()
