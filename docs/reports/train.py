import os
import signal
import threading

import torch
import torch.distributed as dist

from mlaunch import launcher

fail = os.environ["FAIL"]


@launcher(n_gpus=4, deadline=2 if fail == "stuck" else None)
def train(lr):
    loss = torch.ones(1)
    for step in range(10):
        if step == 3 and dist.get_rank() == 1:
            if fail == "raised":
                raise ValueError(f"no such learning rate: {lr}")
            if fail == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        dist.all_reduce(loss)
    return loss


train(-1)
