"""Shards a model over two ranks, trains it, saves the shards, returns the full weights."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import mlaunch


@mlaunch.launcher(n_gpus=2, seed=0, results="rank0")
def train(steps, folder):
    device = mlaunch.device()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)  # after fully_shard
    torch.manual_seed(dist.get_rank())  # other data on each rank
    for _ in range(steps):
        x = torch.randn(32, 4, device=device)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weight = model[0].weight
    print(f"{tuple(weight.to_local().shape)} of {tuple(weight.shape)} is here")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=whole)


with tempfile.TemporaryDirectory() as folder:
    weights, _ = train(100, folder)
    print({name: tuple(value.shape) for name, value in weights.items()})
