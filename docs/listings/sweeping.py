import torch.distributed as dist

from mlaunch import launcher


# Two ranks each; on CPUs, two launches at a time.
@launcher(n_gpus=2, device_type="cpu", concurrent=2)
def train(lr, width=64):
    return lr * width * (dist.get_rank() + 1)


runs = train.grid(lr=[0.1, 0.01], width=[64, 128])
for run in runs.as_completed():
    print(run.arguments["lr"], run.arguments["width"], run.result())
