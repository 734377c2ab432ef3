"""Two ranks, each on cores of its own near its device; without devices they share what there is."""

import os

from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu", numa="exclusive")
def train():
    return sorted(os.sched_getaffinity(0))


print(train())
