"""Calls functions on another rank by torch.distributed.rpc."""

import torch
import torch.distributed as dist
from torch.distributed import rpc

from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu")
def train():
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    total = None
    if rank == 0:
        total = rpc.rpc_sync("rank1", torch.add, args=(torch.ones(2), 1)).tolist()
    rpc.shutdown()  # waits for all ranks
    return total


print(train())
