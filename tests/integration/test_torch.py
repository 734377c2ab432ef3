"""torch's own distributed parts, unmodified, inside the decorator: on 2 CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mlaunch import launcher

pytestmark = pytest.mark.slow


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def batches(rank: int, world_size: int) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, batch_size=32 // world_size, sampler=sampler)


def step(model: torch.nn.Module, rank: int, world_size: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(rank, world_size):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def weights_of_one_process() -> list[torch.Tensor]:
    def train() -> list[torch.Tensor]:
        model = make_model()
        step(model, 0, 1)
        return [parameter.detach() for parameter in model.parameters()]

    [weights] = launcher(train, 1, device_type="cpu")()
    return weights


def assert_same(ranks: list[list[torch.Tensor]]) -> None:
    alone = weights_of_one_process()
    for ours in ranks:
        for mine, theirs in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_distributed_data_parallel() -> None:
    def train() -> list[torch.Tensor]:
        model = DistributedDataParallel(make_model())
        step(model, dist.get_rank(), dist.get_world_size())
        return [parameter.detach() for parameter in model.module.parameters()]

    assert_same(launcher(train, 2, device_type="cpu")())


@pytest.mark.nightly
def test_fully_sharded() -> None:
    def train() -> list[torch.Tensor]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        model = make_model()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        step(model, dist.get_rank(), dist.get_world_size())
        return [p.full_tensor().detach() for p in model.parameters() if isinstance(p, DTensor)]

    assert_same(launcher(train, 2, device_type="cpu")())


@pytest.mark.nightly
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_distributed_checkpoint(tmp_path: Path, start_method: str) -> None:
    def train() -> bool:
        import torch.distributed.checkpoint as dcp

        model = DistributedDataParallel(make_model())
        step(model, dist.get_rank(), dist.get_world_size())
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        again = DistributedDataParallel(make_model())
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        again.load_state_dict(state["model"])
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    assert launcher(train, 2, device_type="cpu", start_method=start_method)() == [True, True]
