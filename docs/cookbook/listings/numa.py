"""Binds each of two ranks to CPUs of its own, before the function starts threads."""

import os

import torch.distributed as dist

from mlaunch import launcher


def bind(local_rank, ranks):
    cpus = sorted(os.sched_getaffinity(0))
    share = cpus[local_rank::ranks] or cpus  # on a machine with NUMA nodes: the CPUs beside the rank's device
    os.sched_setaffinity(0, share)
    return len(share)


@launcher(n_gpus=2, device_type="cpu")
def train():
    bind(int(os.environ["LOCAL_RANK"]), dist.get_world_size())
    return sorted(os.sched_getaffinity(0))


print(train())
