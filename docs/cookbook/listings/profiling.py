"""Profiles a few steps of each rank, and writes a trace for each."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import mlaunch


@mlaunch.launcher(n_gpus=2)
def train(folder):
    device = mlaunch.device()
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    steps = schedule(wait=1, warmup=1, active=2)
    with profile(activities=activities, schedule=steps) as profiler:
        for _ in range(4):
            with record_function("step"):
                model(torch.randn(32, 64, device=device)).sum().backward()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank_{dist.get_rank()}.json"))
    return {row.key: row.count for row in profiler.key_averages()}


folder = Path(sys.argv[1] if sys.argv[1:] else "traces")
folder.mkdir(exist_ok=True)
counts = train(folder)
train.last.to_chrome_trace(folder / "launch.json")
print([count["step"] for count in counts], "steps were recorded")
