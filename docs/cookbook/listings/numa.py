"""Two ranks, each on its own cores near its device; without devices they divide the cores."""

import os

from mlaunch import launcher


@launcher(n_gpus=2, device_type="cpu", numa="exclusive")
def train():
    return sorted(os.sched_getaffinity(0))


print(train())
