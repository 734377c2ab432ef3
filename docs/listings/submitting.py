from concurrent.futures import as_completed

import torch.distributed as dist

from mlaunch import launcher


# Two ranks each; on CPUs, two launches at a time.
@launcher(n_gpus=2, device_type="cpu", concurrent=2)
def train(lr):
    return lr * (dist.get_rank() + 1)


runs = [train.submit(lr) for lr in (1, 2, 3)]
for run in as_completed(runs):
    print(run.arguments["lr"], run.result())
