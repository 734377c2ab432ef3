"""What every contestant's ranks do. Small, since new ranks import it in each call."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.gpu.place import HAS_TENSORS, KIND, backend, place


def reduce_once() -> float:
    value = torch.ones(1, device=place())
    dist.all_reduce(value)
    return value.item()


def join_by_environment() -> None:
    _take_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend())
    reduce_once()
    dist.destroy_process_group()


def join(rank: int, size: int, port: int) -> None:
    _take_device(rank)
    dist.init_process_group(backend(), init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    reduce_once()
    dist.destroy_process_group()


def _take_device(local_rank: int) -> None:
    if HAS_TENSORS and KIND != "cpu":
        torch.accelerator.set_device_index(local_rank)
